"""Checks of what the ranks say to each other."""
