"""A generated grid of divergences: every way that ranks can part, broken and put right."""
