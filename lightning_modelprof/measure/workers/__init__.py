"""What happens in the workers of a DataLoader, measured there."""
