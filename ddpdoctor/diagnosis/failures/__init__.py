"""Errors that have a known cause."""
