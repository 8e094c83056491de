"""The switch for the fast reading of a distributed checkpoint's repetitions."""

from __future__ import annotations

# If it is off, every description and archive is read in full, which is much slower and finds the same. There is no
# setting for it. A test reads everything both ways, and you can do the same.
BY_HEART = True
