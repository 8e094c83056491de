"""Roll a run back, or restore a checkpoint elsewhere."""
