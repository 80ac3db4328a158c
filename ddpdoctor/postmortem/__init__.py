"""What a dead job left: logs and flight-recorder dumps, read into a record."""
