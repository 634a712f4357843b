"""Instruments that measure every step."""
