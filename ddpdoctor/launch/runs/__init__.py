"""The directories of runs, and what a run left elsewhere."""
