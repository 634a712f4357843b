"""Facts about the model's modules."""
