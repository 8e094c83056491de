"""The pass that the daemon and the guard repeat: protect, verify, promote, clean up."""
