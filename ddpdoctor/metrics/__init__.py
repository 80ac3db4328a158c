"""The figures of a watched job for Prometheus, their names, and the port where they are fetched."""
