"""Python, executed on four imagined ranks at once."""
