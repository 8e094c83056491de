"""What watches one run: passes over it, what is known of it between them, and the events that wake it."""
