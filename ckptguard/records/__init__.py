"""What ckptguard itself stores beside a run. docs/reference/records.md specifies every byte of it."""
