"""Samples stacks from a separate thread."""
