"""The rules, by topic; ``all_rules`` collects them."""
