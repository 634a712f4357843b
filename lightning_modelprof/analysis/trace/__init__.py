"""Facts about a trace, one file each."""
