"""Checks of what each rank is fed."""
