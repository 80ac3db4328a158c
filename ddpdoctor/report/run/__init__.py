"""Reports of a watched run."""
