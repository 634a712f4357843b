"""What one step is asked: FLOPs, modules, lines, tensors."""
