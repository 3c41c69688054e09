"""Checkpoints outside of training: one process, no process groups."""
