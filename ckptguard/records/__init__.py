"""What ckptguard itself stores beside a run. FORMAT.md specifies every byte of it."""
