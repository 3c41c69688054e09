"""Data loading under a layout: shares of each batch, seeds, and the position to resume from."""
