"""Findings compared: where they are, which are the same, and which belong together."""
