"""Modules: their kind, size and time."""
