"""FLOPs of real steps: counted by operator, phase and module while the step runs."""
