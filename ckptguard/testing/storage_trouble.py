"""The laws of shared use and of failures: threads, forks and other processes, many and odd names, errors, secrets,
uploads."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import ClassVar

import pytest

from ckptguard.errors import DeniedError, ObjectExistsError, ObjectMissingError, StorageError
from ckptguard.storage import Entry, Storage, open_storage

ODD = (
    *("a b", " ", "a ", "[x]*?", "{a,b}", "new\nline", "tab\t", "größe-重み-🙂", "-rf", "#%41", "%2F", "a+b", "a&b=c"),
    *(".hidden", "...", "a::b", "q?x=1", "~", "semi;colon", "'\"", "back\\slash", "$HOME", "é", "\x7f"),
)


LARGE = 17 << 20  # more than two parts, and not a whole number of them
BLOCK = (1 << 20) + 1


def keys(entries: list[Entry]) -> list[str]:
    """The keys of a listing."""
    return [entry.key for entry in entries]


def winners(bodies: list[bytes], write: Callable[[bytes, Callable[[], int]], None]) -> list[bytes]:
    """Return the bodies whose `write` found a free key. All calls run at once; each gets a function to wait for the
    others."""
    barrier = threading.Barrier(len(bodies))

    def race(body: bytes) -> bool:
        try:
            write(body, barrier.wait)
        except ObjectExistsError:
            return False
        return True

    with ThreadPoolExecutor(len(bodies)) as racers:
        return [body for body, won in zip(bodies, racers.map(race, bodies), strict=True) if won]


class RawAccess:
    """How the laws reach a store without the storage."""

    def put_raw(self, storage: Storage, key: str, data: bytes) -> None:
        """Write an object without the storage, replacing what is there."""
        raise NotImplementedError

    def get_raw(self, storage: Storage, key: str) -> bytes:
        """Read an object without the storage."""
        raise NotImplementedError


class SharedLaws(RawAccess):
    """What holds when a storage is used by many at once."""

    def test_threads(self, storage: Storage) -> None:
        """Eight threads write, list, read and remove, each its own, and find what they wrote."""

        def work(number: int) -> None:
            for turn in range(4):
                key, data = f"t{number}/{turn}", secrets.token_bytes(10_000)
                storage.create(key, data)
                with storage.open(key) as reader:
                    assert reader.read(100, 9_900) == data[100:]
                assert keys(storage.list(f"t{number}")) == [f"t{number}/{n}" for n in range(turn + 1)]
            storage.remove(f"t{number}/0")

        with ThreadPoolExecutor(8) as threads:
            assert list(threads.map(work, range(8))) == [None] * 8
        assert len(storage.list(recursive=True)) == 24

    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
    def test_after_a_fork(self, storage: Storage) -> None:
        """A child uses the storage and the reader that its parent had opened, and so does the parent afterwards."""
        data = secrets.token_bytes(50_000)
        self.put_raw(storage, "k", data)
        with storage.open("k") as reader:
            assert reader.read(0, 10) == data[:10]
            ours, theirs = multiprocessing.Pipe()
            child = os.fork()
            if child == 0:
                _in_child(storage, reader.read, theirs)
            theirs.close()
            reported = ours.recv() if ours.poll(60) else "no answer"
            os.waitpid(child, 0)
            assert reported == ("fine", data[20:30])
            assert reader.read(40_000, 10_000) == data[40_000:]
        assert keys(storage.list()) in (["k"], ["child", "k"])  # a child's memory is its own


def _in_child(storage: Storage, read: Callable[[int, int], bytes], answers: Connection) -> None:
    try:
        storage.create("child", b"1")
        assert storage.stat("child").size == 1
        answers.send(("fine", read(20, 10)))
    except BaseException:
        answers.send(traceback.format_exc())
    finally:
        os._exit(0)


class NameLaws(RawAccess):
    """What holds for many keys, and for odd ones."""

    many: ClassVar[int] = 1100  # more than one answer of the server holds

    def put_many(self, storage: Storage, keys: list[str]) -> None:
        """Write many small objects, without the storage if that is faster."""
        for key in keys:
            self.put_raw(storage, key, b"1")

    def test_more_keys_than_one_answer_holds(self, storage: Storage) -> None:
        """All keys of a large folder are listed, one level or all, and all are removed."""
        names = [f"many/{number:04d}" for number in range(self.many)]
        self.put_many(storage, names)
        self.put_raw(storage, "many.txt", b"1")
        self.put_raw(storage, "many0/x", b"1")
        assert keys(storage.list("many")) == names
        assert keys(storage.list("many", recursive=True)) == names
        assert keys(storage.list()) == ["many", "many.txt", "many0"]
        storage.remove("many")
        assert keys(storage.list(recursive=True)) == ["many.txt", "many0/x"]

    def test_a_deep_key(self, storage: Storage) -> None:
        """Thirty folders deep is nothing special."""
        key = "/".join(f"d{n}" for n in range(30)) + "/k"
        storage.create(key, b"1")
        assert keys(storage.list(recursive=True)) == [key]
        assert [e.kind for e in storage.list("d0/d1")] == ["folder"]
        storage.remove("d0")
        self.put_raw(storage, "x", b"1")
        assert keys(storage.list()) == ["x"]

    def test_a_folder_named_like_a_series(self, storage: Storage) -> None:
        """The records of a series lie in a folder whose name may end in a number sign."""
        for key in ("m/step-#/1", "m/step-#/a/2", "m/step-/3"):
            storage.create(key, b"1")
        assert [(e.key, e.kind) for e in storage.list("m")] == [("m/step-", "folder"), ("m/step-#", "folder")]
        assert keys(storage.list("m/step-#")) == ["m/step-#/1", "m/step-#/a"]
        assert keys(storage.list("m/step-#", recursive=True)) == ["m/step-#/1", "m/step-#/a/2"]
        assert storage.stat("m/step-#").kind == "folder"
        storage.move("m/step-#", "moved-#")
        assert keys(storage.list(recursive=True)) == ["m/step-/3", "moved-#/1", "moved-#/a/2"]
        storage.remove("moved-#")
        assert keys(storage.list(recursive=True)) == ["m/step-/3"]

    def test_odd_names(self, storage: Storage) -> None:
        """Every character of Unicode but NUL and the slash is only a part of a name, of a file or of a folder."""
        kept = []
        for name in ODD:
            try:
                storage.create(name, name.encode())
            except DeniedError:
                assert not storage.capabilities().any_name
                with pytest.raises(DeniedError):
                    storage.stat(f"d/{name}/x")
            else:
                storage.create(f"d/{name}/x", name.encode())
                kept.append(name)
        assert {"a b", "größe-重み-🙂", "a+b", ".hidden", "#%41"} <= set(kept)
        files, inside = sorted(kept), sorted(f"d/{name}/x" for name in kept)
        assert keys(storage.list(recursive=True)) == sorted(files + inside)
        assert [e.key for e in storage.list() if e.kind == "file"] == files
        assert keys(storage.list("d")) == sorted(f"d/{name}" for name in kept)
        for name in kept:
            assert storage.stat(name).size == len(name.encode())
            assert keys(storage.list(f"d/{name}")) == [f"d/{name}/x"]
            with storage.open(f"d/{name}/x") as reader:
                assert reader.read(0, reader.entry.size) == name.encode()
            storage.copy(name, f"copied/{name}")
            assert self.get_raw(storage, f"copied/{name}") == name.encode()
            storage.remove(f"d/{name}")
        with pytest.raises(ObjectExistsError):
            storage.create(kept[-1], b"other")
        storage.move("copied", "moved")
        for name in kept:
            storage.remove(name)
        assert keys(storage.list(recursive=True)) == sorted(f"moved/{name}" for name in kept)


class HonestyLaws(RawAccess):
    """What holds for errors and for what a storage says about itself."""

    def secrets(self) -> frozenset[str]:
        """Return what no message may contain: the keys that the storage was opened with."""
        return frozenset()

    def opened_again(self, storage: Storage) -> Storage:
        """Another opening of the same place."""
        return open_storage(storage.url, must_exist=True)

    def test_capabilities_are_true(self, storage: Storage) -> None:
        """The storage can do what it reports; finding out leaves nothing behind."""
        said = storage.capabilities()
        self.put_raw(storage, "k", b"1" * 10)
        assert keys(storage.list(recursive=True)) == ["k"]
        assert said == storage.capabilities()
        assert (storage.stat("k").etag is not None) == said.etags
        assert storage.copy("k", "linked/x", how="link") in ({"link", "reflink", "copy"} if said.links else {"copy"})
        storage.remove("linked/x")
        assert ("linked" in keys(storage.list())) <= said.folders
        free = storage.free_space()
        assert free is None or free > 0

    def test_a_time_is_told(self, storage: Storage) -> None:
        """Entries say when they were written, within a day of our clock."""
        self.put_raw(storage, "k", b"1")
        assert abs((storage.stat("k").mtime_ns or 0) / 1e9 - time.time()) < 86_400

    def test_errors_name_the_key_and_no_secret(self, storage: Storage) -> None:
        """Every error names the key, and none of the options' secrets."""
        self.put_raw(storage, "folder/taken", b"1")
        hidden = self.secrets()
        for attempt in (
            lambda: storage.stat("folder/absent"),
            lambda: storage.open("folder/absent"),
            lambda: storage.open("folder"),
            lambda: storage.create("folder/taken", b"2"),
            lambda: storage.copy("folder/absent", "folder/other"),
            lambda: storage.move("folder/taken", "folder/taken"),
        ):
            with pytest.raises(StorageError) as caught:
                attempt()
            assert "folder" in caught.value.message
            assert not any(secret in str(caught.value) + str(caught.value.hint) for secret in hidden)
            assert not any(secret in repr(storage) + storage.url for secret in hidden)

    def test_another_opening_sees_the_same(self, storage: Storage) -> None:
        """What one opening of a URL wrote, the next finds at once."""
        storage.create("a/k", b"123")
        other = self.opened_again(storage)
        assert other.url == storage.url
        assert [(e.key, e.size) for e in other.list(recursive=True)] == [("a/k", 3)]
        other.remove("a/k")
        other.create("b", b"1")
        assert keys(storage.list(recursive=True)) == ["b"]


class UploadLaws(RawAccess):
    """What holds for uploads to every storage."""

    @pytest.mark.parametrize("size", [0, 1, 100_000, 8 << 20, LARGE], ids=["empty", "byte", "small", "part", "large"])
    def test_an_upload_is_invisible_until_its_commit(self, storage: Storage, size: int) -> None:
        """Then it is there, whole."""
        data = secrets.token_bytes(size)
        with storage.upload("a/b/k") as upload:
            for at in range(0, size, BLOCK):
                upload.write(memoryview(data)[at : at + BLOCK])
            with pytest.raises(ObjectMissingError):
                storage.stat("a/b/k")
            upload.commit()
        assert storage.stat("a/b/k").size == size
        assert self.get_raw(storage, "a/b/k") == data
        assert keys(storage.list(recursive=True)) == ["a/b/k"]

    @pytest.mark.parametrize("size", [10, LARGE], ids=["small", "large"])
    def test_an_upload_that_is_left_leaves_nothing(self, storage: Storage, size: int) -> None:
        """Aborted, left, or left by an error or an interrupt: neither object nor temporary."""
        self.put_raw(storage, "other", b"1")
        with storage.upload("k") as upload:
            upload.write(bytes(size))
            upload.abort()
            upload.abort()
        with storage.upload("k") as upload:
            upload.write(bytes(size))
        for error in (RuntimeError, KeyboardInterrupt):
            with pytest.raises(error), storage.upload("k") as upload:  # noqa: PT012
                upload.write(bytes(size))
                raise error
        assert keys(storage.list(recursive=True)) == ["other"]

    @pytest.mark.parametrize("size", [10, LARGE], ids=["small", "large"])
    def test_an_upload_replaces_only_where_it_may(self, storage: Storage, size: int) -> None:
        """A key that is taken, before or meanwhile, stays as it was, unless the upload is to replace it."""
        self.put_raw(storage, "taken", b"old")
        self.put_raw(storage, "folder/inside", b"old")
        for key, replace in (("taken", False), ("folder", False), ("folder", True)):
            with pytest.raises(ObjectExistsError), storage.upload(key, replace=replace) as upload:  # noqa: PT012
                upload.write(b"new")
                upload.commit()
        with pytest.raises(ObjectExistsError), storage.upload("late") as upload:  # noqa: PT012
            upload.write(bytes(size))
            self.put_raw(storage, "late", b"first")
            upload.commit()
        assert (self.get_raw(storage, "taken"), self.get_raw(storage, "late")) == (b"old", b"first")
        data = secrets.token_bytes(size)
        with storage.upload("taken", replace=True) as upload:
            upload.write(data)
            assert self.get_raw(storage, "taken") == b"old"
            upload.commit()
        assert self.get_raw(storage, "taken") == data
        assert keys(storage.list(recursive=True)) == ["folder/inside", "late", "taken"]

    def test_a_writers_buffer_may_be_used_again(self, storage: Storage) -> None:
        """What was handed over is taken over."""
        buffer = bytearray(BLOCK)
        with storage.upload("k") as upload:
            for number in range(10):
                buffer[:] = bytes([number]) * BLOCK
                upload.write(buffer)
            upload.commit()
        assert self.get_raw(storage, "k") == b"".join(bytes([number]) * BLOCK for number in range(10))

    def test_two_uploads_of_a_key(self, storage: Storage) -> None:
        """One wins where the store says so, and the object is wholly one of the two, whatever it says."""
        exclusive = storage.capabilities().exclusive_upload

        def write(data: bytes, wait: Callable[[], int]) -> None:
            with storage.upload(f"k{len(data)}") as upload:
                upload.write(data)
                wait()
                upload.commit()

        for size in (10, LARGE):
            won = winners([bytes([n]) * size for n in (1, 2)], write)
            assert self.get_raw(storage, f"k{size}") in won
            assert len(won) == 1 or (not exclusive and len(won) == 2)
