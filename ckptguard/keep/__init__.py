"""Protected copies of checkpoints, and checkpoints moved out of a trainer's sight."""
