"""Adoption of models of other libraries: `adopt`."""
