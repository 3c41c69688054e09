"""Check that the items of a trunk act rightly on parts of sequences."""
