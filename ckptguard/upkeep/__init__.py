"""The pass that daemons and doors loop over: protect, verify, promote, clean up."""
