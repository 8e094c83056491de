"""A run's good checkpoints at another URL: sending them there, finding them, starting from them."""
