"""Names of torch that are private, or differ between the versions that we support.

Every use of such a name stands in this package, with the versions it concerns and the reason, so
that a new torch release is met in one place.
"""
