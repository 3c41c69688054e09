"""Optimizers' companions: gradient clipping, parameter groups, learning rates."""
