"""Tables, one per file; ``all_tables`` collects them in order."""
