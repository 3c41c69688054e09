"""Transforms that put any model on a layout; `apply` alone fixes their order."""
