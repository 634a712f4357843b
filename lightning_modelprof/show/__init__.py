"""Outputs of a report: text, terminal, notebook, HTML, JSON, TensorBoard. They only see a Report."""
