"""What to change, and whose code it is."""
