"""The callback's arguments."""
