"""What calls into torch and its libraries do to the imagined ranks."""
