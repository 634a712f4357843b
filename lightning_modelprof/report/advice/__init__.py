"""Advice: what to change, and whose code it is."""
