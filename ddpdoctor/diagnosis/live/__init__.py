"""The verdict on ranks that still run, in a rehearsal, a watched job or under ``autopsy --live``."""
