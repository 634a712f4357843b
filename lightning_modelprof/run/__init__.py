"""Measured facts and their files. Needs neither torch nor lightning."""
