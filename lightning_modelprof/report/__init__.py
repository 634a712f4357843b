"""What a reader sees: tables and notes built from an analysis."""
