"""Strict reading of zip archives: checksums, bounds, no overlaps."""
