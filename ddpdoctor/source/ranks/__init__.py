"""What differs between the imagined ranks."""
