"""Checks of what makes steps slow."""
