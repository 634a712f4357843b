"""Derived facts: every number is computed here, once."""
