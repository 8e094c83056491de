"""Going back: roll a run back, or restore a checkpoint elsewhere."""
