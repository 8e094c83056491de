"""What other tools notice, keep and cost, beside ckptguard: the same checkpoints, the same faults, the same work."""
