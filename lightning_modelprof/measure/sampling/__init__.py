"""The thread that looks at the stack."""
