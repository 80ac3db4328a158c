"""The user's files, kept as they are by a rehearsed rank."""
