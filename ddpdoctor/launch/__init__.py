"""Starts a job under observation; owns processes, signals and the run directory."""
