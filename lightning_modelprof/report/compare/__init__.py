"""Comparisons as reports."""
