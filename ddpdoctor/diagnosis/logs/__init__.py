"""The first cause in what a dead job left."""
