"""The pass that the daemon and the guard repeat, in `reconcile.py`: protect, verify, keep, prune."""
