"""One loop that is measured: its session, windows, inspection and outputs."""
