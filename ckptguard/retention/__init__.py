"""Which checkpoints stay and which go, and what happens to those that go."""
