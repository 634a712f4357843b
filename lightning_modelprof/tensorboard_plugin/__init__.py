"""The dashboard: a TensorBoard tab."""
