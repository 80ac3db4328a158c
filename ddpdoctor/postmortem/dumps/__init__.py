"""Dumps of torch's flight recorder that a dead job left."""
