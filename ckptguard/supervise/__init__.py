"""Running any training command, and taking it back when its saves turn sick."""
