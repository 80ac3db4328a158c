"""The documents say what is so: their examples are executed, and the site is built."""
