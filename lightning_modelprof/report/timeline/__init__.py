"""A trace as a timeline that can be drawn."""
