"""Saving: copies on the host, the plan of who writes what, writers in the background."""
