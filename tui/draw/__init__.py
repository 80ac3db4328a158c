"""What the screen is drawn with."""
