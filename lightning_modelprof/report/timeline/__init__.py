"""Traces as timelines."""
