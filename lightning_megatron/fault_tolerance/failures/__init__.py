"""Which rank failed first, when all of them end with an exception."""
