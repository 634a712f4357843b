"""Tables about a trace, one file each."""
