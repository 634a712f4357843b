"""Measured facts and their files. Imports neither torch nor lightning."""
