"""Measure one loop: its session, windows, inspection and outputs."""
