"""See `all_tables`."""
