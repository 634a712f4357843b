"""Charts and flame graphs, by what they show; ``all_charts`` finds them."""
