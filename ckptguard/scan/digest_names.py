"""Whole-file digests by name: hashlib's, and git's name of a file's content."""

from __future__ import annotations

import hashlib

from blake3 import blake3

from ckptguard.scan.digest_threads import Hasher

GIT_SHA1 = "git-sha1"


def new_hasher(name: str, size: int) -> Hasher:
    """A hasher for a file of `size` bytes. "git-sha1" is the name that git gives a file: SHA-1 over its kind, its
    size and its bytes; "blake2b-256" is BLAKE2b of so many bits; any other name but "blake3" is hashlib's."""
    if name == "blake3":
        return blake3()
    if name.startswith("blake2b-"):
        return hashlib.blake2b(digest_size=int(name.removeprefix("blake2b-")) // 8, usedforsecurity=False)
    if name == GIT_SHA1:
        return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    return hashlib.new(name, usedforsecurity=False)
