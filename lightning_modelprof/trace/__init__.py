"""Traces of torch.profiler: the reader and its records."""
