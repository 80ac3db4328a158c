"""The processes of a run, from outside."""
