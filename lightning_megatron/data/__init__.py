"""Text that models read."""
