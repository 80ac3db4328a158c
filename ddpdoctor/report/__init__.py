"""One file per output format; ``streams`` alone owns stdout and stderr."""
