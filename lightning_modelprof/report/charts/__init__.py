"""Charts and flame graphs by topic; ``all_charts`` collects them."""
