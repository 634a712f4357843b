"""The tables, one per file; ``all_tables`` names them in their order."""
