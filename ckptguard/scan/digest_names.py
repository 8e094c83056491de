"""Whole-file digests by name: hashlib's, and git's name of a file's content."""

from __future__ import annotations

import hashlib

from ckptguard.scan.digest_threads import Hasher

GIT_SHA1 = "git-sha1"


def new_hasher(name: str, size: int) -> Hasher:
    """A hasher for a file of `size` bytes. "git-sha1" is the name that git gives a file: SHA-1 over its kind, its
    size and its bytes; any other name is hashlib's."""
    if name == GIT_SHA1:
        return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    return hashlib.new(name, usedforsecurity=False)
