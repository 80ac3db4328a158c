"""What a watched job tells Prometheus: which figures, under which names, and the port where they are fetched."""
