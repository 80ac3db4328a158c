"""The loaders of a rehearsed rank and its shortened passes."""
