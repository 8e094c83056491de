"""Work on all checkpoints of many runs, on an executor that may span machines."""
