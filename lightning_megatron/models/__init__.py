"""Reference networks made from the layers."""
