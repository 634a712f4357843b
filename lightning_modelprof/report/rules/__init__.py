"""The rules, one per file; ``all_rules`` names them in their order."""
