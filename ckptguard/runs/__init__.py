"""What is known of one run: its listing, its history, its settings, and the known-good checkpoint."""
