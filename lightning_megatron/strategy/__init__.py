"""The Lightning strategy and its parts."""
