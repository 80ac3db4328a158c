"""Measures the static reading on public training scripts, which stay where they are: only their labels are here."""
