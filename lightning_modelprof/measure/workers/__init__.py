"""Measurement inside the workers of a DataLoader."""
