"""See `all_charts`."""
