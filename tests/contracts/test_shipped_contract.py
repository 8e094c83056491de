"""The contract of a storage is shipped: somebody who has no tests of ours runs it on a store of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import ckptguard

OURS = """
import secrets

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from ckptguard.storage import Storage, open_storage
from ckptguard.testing import StorageContract


class Shelf(MemoryFileSystem):
    protocol = "shelf"
    store, pseudo_dirs = {}, [""]

    @classmethod
    def _strip_protocol(cls, path):
        return "/" + path.removeprefix("shelf://").strip("/")


fsspec.register_implementation("shelf", Shelf)


class TestShelf(StorageContract):
    @pytest.fixture
    def storage(self) -> Storage:
        url = f"shelf://{secrets.token_hex(8)}"
        Shelf().makedirs(url)
        return open_storage(url)

    def absent(self) -> Storage:
        return open_storage(f"shelf://absent-{secrets.token_hex(8)}", must_exist=False)

    def put_raw(self, storage, key, data):
        Shelf().pipe_file(f"{storage.url}/{key}", data)

    def get_raw(self, storage, key):
        return Shelf().cat_file(f"{storage.url}/{key}")
"""


def test_anybody_can_run_it(tmp_path: Path) -> None:
    """With the package alone on the path, its laws of creating, reading and listing hold for a stranger's store."""
    (tmp_path / "test_shelf.py").write_text(OURS)
    environment = {**os.environ, "PYTHONPATH": str(Path(ckptguard.__file__).parents[1])}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "create or read or list or remove"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert int(ended.stdout.split(" passed")[0].split()[-1]) > 10


def test_nobody_pays_for_it() -> None:
    """The package itself imports neither the contract nor pytest."""
    code = "import sys, ckptguard.storage.opening; assert not {'pytest', 'ckptguard.testing'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
