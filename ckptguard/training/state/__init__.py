"""A training's own state beside its weights: progress, data position, random numbers."""
