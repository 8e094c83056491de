"""The catalogue: a local SQLite cache of what the runs' records say. It answers questions about many runs."""
