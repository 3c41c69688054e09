"""Parallel layers; each is an ordinary module until it is distributed over a mesh."""
