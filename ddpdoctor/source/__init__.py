"""Reads scripts: modules, imports, values, and what each rank would do. Never imports torch."""
