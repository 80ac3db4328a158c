"""What a run that still runs waits for."""
