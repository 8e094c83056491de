"""Find the runs of a fleet, and the settings of each."""
