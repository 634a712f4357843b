"""Derived facts. Every figure is computed here, once."""
