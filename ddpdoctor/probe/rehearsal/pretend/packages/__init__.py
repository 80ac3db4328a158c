"""Packages that are not installed, and what stands for them."""
