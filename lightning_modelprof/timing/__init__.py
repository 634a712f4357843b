"""Timing of functions and models without a Trainer."""
