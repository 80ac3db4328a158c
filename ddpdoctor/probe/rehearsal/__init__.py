"""What only a rehearsal does inside the ranks: collective tap, short loaders, no-touch rule, the ending."""
