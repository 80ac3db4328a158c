"""Outside the ranks: reads the record while it grows and asks diagnosis what it means."""
