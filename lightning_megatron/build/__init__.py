"""Weights that are made late: where they lie, and by the numbers that one process draws."""
