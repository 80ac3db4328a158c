"""Distributed tests of other libraries, and public examples: the same with and without the doctor."""
