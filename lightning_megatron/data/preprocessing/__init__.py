"""Text and conversations of files as tokens on disk."""
