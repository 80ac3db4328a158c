"""Files that several ranks use."""
