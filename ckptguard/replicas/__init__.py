"""Copies of a run's good checkpoints at another URL: sending them, finding them, and starting from them."""
