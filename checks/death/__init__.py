"""Checks of why a rank died."""
