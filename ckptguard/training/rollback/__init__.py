"""Rolling back inside a training process, and resuming."""
