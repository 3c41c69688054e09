"""What a run measures and then sets by itself: partition, schedule, recomputation, microbatches."""
