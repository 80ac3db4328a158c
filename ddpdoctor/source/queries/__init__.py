"""What several checks ask of a projected script."""
