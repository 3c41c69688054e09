"""Fault injection: faults as data, the acts themselves, and runs that are made to fail."""
