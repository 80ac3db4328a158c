"""The files of a script and their syntax."""
