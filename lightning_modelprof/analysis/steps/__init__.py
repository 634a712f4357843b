"""Facts about steps."""
