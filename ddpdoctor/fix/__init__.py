"""Edits of the user's source: what a check offers, and how it is written."""
