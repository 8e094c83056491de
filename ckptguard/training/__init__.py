"""The guard inside a training process: `TrainingGuard` and its parts."""
