"""What every step is measured by."""
