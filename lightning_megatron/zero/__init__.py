"""Data parallelism: weights that are whole on every rank, or shared out (ZeRO)."""
