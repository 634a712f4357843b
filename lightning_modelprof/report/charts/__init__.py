"""The charts, one per file; ``all_charts`` names them in their order."""
