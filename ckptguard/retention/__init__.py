"""Which checkpoints stay and which are removed, and how they are removed."""
