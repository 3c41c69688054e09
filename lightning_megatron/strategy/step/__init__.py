"""One training step or evaluation of a batch: microbatches, loss, gradients, logs."""
