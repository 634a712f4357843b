"""Facts about the user's source lines."""
