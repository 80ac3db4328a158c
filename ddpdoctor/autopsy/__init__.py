"""A dead or hanging job, from what it left or shows to the first cause."""
