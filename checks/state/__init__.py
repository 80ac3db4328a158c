"""Checks of what is saved and loaded."""
