"""Slow ranks: `SlowRankDetector` compares the times of ranks that do the same work."""
