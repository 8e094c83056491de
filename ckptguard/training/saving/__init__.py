"""Saving: ckptguard's own layout or the user's files, in front of training or behind it."""
