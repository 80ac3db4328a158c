"""A running job: where its data comes from, the checks of it, and the run to compare with."""
