"""Contents of TensorBoard's event files."""
