"""What goes into TensorBoard's event files."""
