"""What only a rehearsal does inside the ranks: hooks of collectives, short loaders, no-touch rule, the ending."""
