"""Compares what a rehearsal needed and found with what was agreed on before: a baseline, or another revision. Pure."""
