"""The one switch of what reads a distributed checkpoint's repetitions by heart."""

from __future__ import annotations

# Off, every description and every archive is read in full, which takes many times as long and finds the same: there is
# no setting for it, but a test reads everything both ways, and who doubts an answer can too.
BY_HEART = True
