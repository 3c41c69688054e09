"""Optimizer-side parts: clipping, parameter groups, learning rates."""
