"""Checks of a run before any process group forms."""
