"""The rules, by their topics; ``all_rules`` finds them."""
