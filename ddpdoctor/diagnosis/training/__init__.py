"""What the ranks train on and with."""
