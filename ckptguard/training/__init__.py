"""The guard inside a training process: `TrainingGuard` and what it is made of."""
