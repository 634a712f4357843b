"""Tables about a run, one file each."""
