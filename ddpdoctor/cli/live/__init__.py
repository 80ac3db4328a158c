"""A job that is watched from the command line: its process, its signals, its screen or its lines."""
