"""The collectives of a rehearsed rank."""
