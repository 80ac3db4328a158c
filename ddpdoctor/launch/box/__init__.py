"""The box of a rehearsal: namespaces and overlays in which nothing that the script writes reaches the user's files."""
