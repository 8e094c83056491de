"""The catalogue: a local cache of what the runs' records say, for the page of a daemon."""
