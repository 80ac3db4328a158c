"""Strangers and liars at the ports of a watched job: `python -m tests.intruders`."""
