"""FLOP formulas, counts and device peaks."""
