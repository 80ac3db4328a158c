"""Which checks there are, which of them run, and how one is run."""
