"""Storage on a local file system: exclusive creation, syncs, links and reflinks."""
