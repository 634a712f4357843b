"""The tables, one per file; ``all_tables`` has them in their order."""
