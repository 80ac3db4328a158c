"""Reading, choosing and replacing the user's files."""
