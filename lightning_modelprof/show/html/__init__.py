"""HTML pages and their parts."""
