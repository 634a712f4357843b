"""The dashboard: a tab of TensorBoard."""
