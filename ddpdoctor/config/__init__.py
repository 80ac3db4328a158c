"""What the project says: its settings, and the comments that suppress findings."""
