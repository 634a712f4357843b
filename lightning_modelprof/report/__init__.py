"""Reports: tables, findings, charts and notes built from facts."""
