"""Checks of gradients, parameters and buffers."""
