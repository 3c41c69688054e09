"""Metrics and events of a run, and the callbacks that log them."""
