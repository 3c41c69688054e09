"""Saving: the copy in host memory, the assignment of chunks to ranks, the writers."""
