"""Run any training command, and roll back when its saves turn sick."""
