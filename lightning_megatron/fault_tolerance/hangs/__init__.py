"""Hangs: `HangDetector`, the monitors that watch the ranks, and the diagnosis."""
