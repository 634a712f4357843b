"""User lines that run operators, and the work they waste."""
