"""One file a command, or two that are opposites or one and many."""
