"""Preemption: signals that end a run, and the checkpoint saved before it ends."""
