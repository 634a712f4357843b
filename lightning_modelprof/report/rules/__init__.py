"""See `all_rules`."""
