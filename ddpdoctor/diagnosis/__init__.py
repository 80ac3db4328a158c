"""Pure functions from a record to facts; no clock, no process, no file."""
