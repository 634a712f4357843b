"""Watches operators and modules during a step and leaves no trace."""
