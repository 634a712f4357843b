"""Modules: what they are, their size and their time."""
