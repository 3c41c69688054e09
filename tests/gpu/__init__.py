"""Runs that need a GPU."""
