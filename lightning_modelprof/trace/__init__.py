"""Reader of torch.profiler traces, and its records."""
