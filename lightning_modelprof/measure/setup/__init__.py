"""What trains, read once when the loop starts."""
