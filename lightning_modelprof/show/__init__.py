"""How a report is shown: text, terminal, JSON, TensorBoard. Sees a Report and nothing else."""
