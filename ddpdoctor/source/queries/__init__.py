"""Queries on a projected script that several checks share."""
