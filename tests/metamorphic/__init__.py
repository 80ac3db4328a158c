"""Programs that are written otherwise and mean the same: what is found in them has to be the same."""
