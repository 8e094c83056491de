"""Saving: ckptguard's own layout or the user's files, while training waits or in the background."""
