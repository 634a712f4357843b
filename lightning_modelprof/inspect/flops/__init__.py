"""FLOPs: formulas, counts, the peaks of devices."""
