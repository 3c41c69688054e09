"""Root cause: the rank that failed first, when all end with an exception."""
