"""Pasteable changes: a finding's fix as a diff of the user's statement, or as the line to write."""
