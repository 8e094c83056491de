"""Everything known about one run: its listing, its history, its settings, and its known-good checkpoint."""
