"""Tensors of which this rank has a part, and that stand for the whole."""
