"""Checkpoints that do not depend on the layout they were written under."""
