"""Inspects single steps: FLOPs, modules, lines and tensors."""
