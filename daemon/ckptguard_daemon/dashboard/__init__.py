"""The data behind the page: what the catalogue knows, what a click reads, and what happens now."""
