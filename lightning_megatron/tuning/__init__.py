"""Tuners: a run measures and sets partition, schedule, recomputation and microbatches itself."""
