"""Watching a step: operators as they run, modules around them, nothing left behind."""
