"""Everything that depends on Lightning."""
