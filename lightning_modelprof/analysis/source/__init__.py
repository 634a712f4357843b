"""Facts about the user's lines."""
