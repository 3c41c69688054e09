"""Activation memory: recomputation, offloading, and distributed inputs of blocks."""
