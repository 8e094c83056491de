"""Questions that change nothing: status, listings, tensors, differences, the first bad save."""
