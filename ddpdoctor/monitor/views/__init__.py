"""The parts of a snapshot."""
