"""One process against several: what the ranks keep of their first steps, and how one process is given the same."""
