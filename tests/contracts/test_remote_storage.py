"""fsspec's memory file system, which stands for every remote one, keeps the contract of `Storage`; URLs."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from ckptguard.errors import (
    NotFoundError,
    ObjectExistsError,
    SettingsError,
    StorageError,
)
from ckptguard.storage import Storage, normalise_url, open_storage
from ckptguard.storage.local.local_storage import LocalStorage
from ckptguard.storage.remote.remote_storage import RemoteStorage
from ckptguard.storage.retries import RetryingStorage
from ckptguard.storage.traits import UNKNOWN
from ckptguard.testing.storage_contract import StorageContract
from ckptguard.testing.storage_trouble import keys


class TestMemoryStorage(StorageContract):
    """fsspec's memory file system, which stands for every remote one."""

    @pytest.fixture
    def storage(self) -> Iterator[Storage]:
        self.base = f"test-{secrets.token_hex(8)}"
        memory = fsspec.filesystem("memory")
        memory.makedirs(f"/{self.base}/root")
        yield open_storage(f"memory://{self.base}/root")
        memory.rm(f"/{self.base}", recursive=True)

    def absent(self) -> Storage:
        return open_storage(f"memory://absent-{secrets.token_hex(8)}/below", must_exist=False)

    def put_raw(self, storage: Storage, key: str, data: bytes) -> None:
        fsspec.filesystem("memory").pipe_file(storage.url.removeprefix("memory:/") + "/" + key, data)

    def get_raw(self, storage: Storage, key: str) -> bytes:
        return fsspec.filesystem("memory").store[storage.url.removeprefix("memory:/") + "/" + key].getvalue()

    def test_a_store_that_ignores_the_condition_is_found_out(
        self, storage: Storage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Where an exclusive put replaces silently, the probe notices, and a taken key is still kept."""
        remote = forgetful(storage, monkeypatch)
        remote.create("k", b"old")
        with pytest.raises(ObjectExistsError):
            remote.create("k", b"new")
        assert self.get_raw(storage, "k") == b"old"
        assert keys(remote.list(recursive=True)) == ["k"]

    def test_a_lost_answer_is_read_back(self, storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
        """A put that was stored and then reported as a conflict counts as ours: its bytes are ours."""
        remote = below(storage)
        monkeypatch.setattr(remote._root, "traits", UNKNOWN)
        real = remote._fs.pipe_file

        def lost(path: str, data: bytes, mode: str = "overwrite") -> None:
            real(path, data, mode=mode)
            raise FileExistsError(path)

        monkeypatch.setattr(remote._fs, "pipe_file", lost)
        storage.create("k", b"with a nonce in it")
        assert self.get_raw(storage, "k") == b"with a nonce in it"

    def test_a_listing_that_fails_is_an_error(self, storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
        """A network fault, whatever its class, never reads as "no checkpoints here"."""
        self.put_raw(storage, "a/x", b"1")
        file_system = below(storage)._fs
        real = file_system.ls

        def broken(path: str, detail: bool = True) -> object:
            if path.endswith("/a"):
                raise RuntimeError("connection reset")
            return real(path, detail=detail)

        monkeypatch.setattr(file_system, "ls", broken)
        with pytest.raises(StorageError, match="connection reset"):
            storage.list(recursive=True)


def forgetful(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> RemoteStorage:
    """The same store, but one that ignores `mode="create"`."""
    remote = below(storage)
    real = remote._fs.pipe_file
    monkeypatch.setattr(remote._root, "traits", UNKNOWN)
    remote._conditional.__dict__.pop("of_objects", None)  # what was tried is remembered
    monkeypatch.setattr(remote._fs, "pipe_file", lambda path, data, mode="overwrite": real(path, data))
    return remote


def below(storage: Storage) -> RemoteStorage:
    """The storage that the retries are wrapped around."""
    assert isinstance(storage, RetryingStorage)
    assert isinstance(storage.inner, RemoteStorage)
    return storage.inner


def test_one_place_has_one_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths, file URLs and trailing slashes all name the same place."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    spellings = ["run", "./run/", tmp_path / "run", f"file://{tmp_path}/run", "~/run", "x/../run"]
    assert {normalise_url(s) for s in spellings} == {str(tmp_path / "run")}
    assert normalise_url("memory:///a/b/") == normalise_url("memory://a/b") == "memory://a/b"
    assert normalise_url("s3://bucket/run/") == "s3://bucket/run"


def test_opening_says_what_is_wrong(tmp_path: Path) -> None:
    """No folder there is not found; a URL that nothing opens is a setting that cannot be true."""
    (tmp_path / "file").write_bytes(b"1")
    for url in (tmp_path / "none", tmp_path / "file", "memory://none-such-thing"):
        with pytest.raises(NotFoundError):
            open_storage(url)
    assert isinstance(open_storage(tmp_path / "none", must_exist=False), LocalStorage)
    with pytest.raises(SettingsError):
        open_storage("nosuchprotocol://x", must_exist=False)
