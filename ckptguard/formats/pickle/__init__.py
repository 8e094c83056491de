"""Reading pickle streams without ever importing or calling what they name."""
