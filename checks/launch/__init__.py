"""Checks of how ranks are started and numbered."""
