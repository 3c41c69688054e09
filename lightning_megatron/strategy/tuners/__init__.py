"""Measure the first steps, then change the schedule, the recomputation or the partition."""
