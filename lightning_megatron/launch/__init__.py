"""The start of a run: its processes meet at a store and agree that all are there."""
