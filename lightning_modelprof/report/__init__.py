"""What a reader sees: tables, findings and notes, made of facts."""
