"""Where the ranks stop calling the same collectives, and why."""
