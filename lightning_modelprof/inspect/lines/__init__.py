"""The user's lines that run operators, and what they do in vain."""
