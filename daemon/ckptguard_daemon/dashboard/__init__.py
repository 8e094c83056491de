"""What the dashboard asks of the daemon, beside the routes for programs."""
