"""Publishing: whole, compared, in bounded memory, under its name or not at all; and nothing else is replaced."""

import contextlib
import itertools
import os
import threading
from pathlib import Path

import pytest
from blake3 import blake3
from fsspec.implementations.memory import MemoryFileSystem

from ckptguard.errors import ChangedWhileReadError, ObjectExistsError, StorageFullError, TransientError
from ckptguard.recover.restore import copy_files
from ckptguard.runs import publish
from ckptguard.runs.publish import Place, for_each, give_names, publish_file, staging
from ckptguard.scan import paced_reader
from ckptguard.scan.paced_reader import Pace
from ckptguard.storage import open_storage
from ckptguard.storage.local.local_storage import LocalReader
from ckptguard.storage.read_ahead import IN_FLIGHT
from ckptguard.storage.remote.remote_storage import RemoteReader, RemoteStorage
from ckptguard.values.manifest import File
from ckptguard.values.temporary_names import ROLLBACK

BLOCK = 1 << 16
DATA = os.urandom(20 * BLOCK + 11)
KINDS = ("local", "memory")


def sealed(path="a", data=DATA):
    """A file as a manifest has it, without spans."""
    return File(path=path, size=len(data), format="other", envelope=blake3(data).hexdigest())


def put(storage, key, data):
    """Place bytes there without what is tested."""
    if storage.root is None:
        MemoryFileSystem().pipe_file(f"/{storage.url.split('://')[1]}/{key}", data)
        return
    path = os.path.join(storage.root, key)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)


def contents(storage):
    """Every key and its bytes, read without what is tested."""
    if storage.root is None:
        root = "/" + storage.url.split("://")[1]
        found = MemoryFileSystem().find(root)
        return {key.removeprefix(root + "/"): MemoryFileSystem().cat_file(key) for key in found}
    paths = [path for path in Path(storage.root).rglob("*") if path.is_file()]
    return {path.relative_to(storage.root).as_posix(): path.read_bytes() for path in paths}


@pytest.fixture
def storages(tmp_path, monkeypatch):
    """One of each kind by name, read in small blocks: a place to read from, and one to write to."""
    monkeypatch.setattr(paced_reader, "REMOTE_BLOCK", BLOCK)
    made = {}
    for kind, side in itertools.product(KINDS, ("from", "to")):
        if kind == "local":
            (tmp_path / side).mkdir()
        else:
            with contextlib.suppress(FileNotFoundError):
                MemoryFileSystem().rm(f"/publish-{side}", recursive=True)
        made[kind, side] = open_storage(
            tmp_path / side if kind == "local" else f"memory://publish-{side}", must_exist=False
        )
    return made


@pytest.fixture(params=itertools.product(KINDS, KINDS), ids="-".join)
def places(request, storages):
    """A source with the data under "in/a", and a target, for every pair of kinds."""
    source, target = storages[request.param[0], "from"], storages[request.param[1], "to"]
    put(source, "in/a", DATA)
    return Place(source, "in/"), Place(target, "out/")


def reader_of(place):
    """The class that reads there."""
    return RemoteReader if place.storage.root is None else LocalReader


def test_every_byte_arrives_and_is_read_once(places, monkeypatch):
    """Progress counts them, too."""
    read, done, kind = [], [], reader_of(places[0])
    real = kind.read
    monkeypatch.setattr(kind, "read", lambda *args: read.append(args[1:]) or real(*args))
    assert publish_file(*places, sealed(), Pace(progress=done.append)) is None
    assert contents(places[1].storage) == {"out/a": DATA}
    assert sum(done) == sum(length for _, length in read) == len(DATA)


@pytest.mark.parametrize("wrong", [DATA[:-1], DATA + b"x", DATA[:-1] + bytes([DATA[-1] ^ 1])])
def test_wrong_bytes_are_not_published(places, wrong):
    """It is said, and nothing is left: no half, no temporary."""
    put(places[0].storage, "in/a", wrong)
    assert "a " in publish_file(*places, sealed(), Pace())
    assert contents(places[1].storage) == {}
    assert publish_file(*places, sealed(), Pace(), compare=False) is None
    assert contents(places[1].storage) == {"out/a": wrong}


@pytest.mark.parametrize("at", ["before", "meanwhile"])
def test_what_was_not_expected_is_not_replaced(places, at):
    """Also if it came while the bytes were read."""

    def come(length):
        if at == "meanwhile":
            put(places[1].storage, "out/a", b"another's")

    if at == "before":
        put(places[1].storage, "out/a", b"another's")
    with pytest.raises(ObjectExistsError):
        publish_file(*places, sealed(), Pace(progress=come))
    assert contents(places[1].storage) == {"out/a": b"another's"}
    assert publish_file(*places, sealed(), Pace(), replace=True) is None
    assert contents(places[1].storage) == {"out/a": DATA}


def test_a_source_that_changes_meanwhile_is_not_published(places):
    """Even if what was read before was right."""
    with pytest.raises(ChangedWhileReadError):
        publish_file(*places, sealed(), Pace(progress=lambda _: put(places[0].storage, "in/a", DATA + DATA)))
    assert contents(places[1].storage) == {}


def test_the_name_is_given_only_inside_of_what_the_caller_holds(places):
    """What it holds is not entered for wrong bytes; if it cannot be entered, nothing is published."""
    seen = []

    @contextlib.contextmanager
    def holding(refuse):
        seen.append(contents(places[1].storage).get("out/a"))
        if refuse:
            raise InterruptedError
        yield
        seen.append(contents(places[1].storage)["out/a"])

    with pytest.raises(InterruptedError):
        publish_file(*places, sealed(), Pace(), committing=holding(True))
    assert contents(places[1].storage) == {}
    assert publish_file(*places, sealed(data=DATA[::-1]), Pace(), committing=holding(False)) is not None
    assert seen == [None]
    assert publish_file(*places, sealed(), Pace(), committing=holding(False)) is None
    assert seen == [None, None, DATA]


class Held:
    """Counts the bytes that were asked of a remote storage and are not written yet: `most` at any time."""

    def __init__(self, monkeypatch):
        self._lock, self._now, self.most = threading.Lock(), 0, 0
        real = RemoteReader.read

        def read(reader, offset, length):
            with self._lock:
                self._now += length
                self.most = max(self.most, self._now)
            return real(reader, offset, length)

        monkeypatch.setattr(RemoteReader, "read", read)

    def written(self, length):
        """The progress of a copy."""
        with self._lock:
            self._now -= length


@pytest.mark.parametrize("sizes", [[20], [5, 7], [5, 7, 3, 6], [5, 0, 0, 1, 7, 3, 1]])
def test_several_files_share_what_is_in_memory(storages, monkeypatch, sizes):
    """Files of many blocks, of one, and empty ones: each is whole, and no more than 64 MiB are held, beside two files
    of a single block."""
    monkeypatch.setattr("ckptguard.recover.restore.REMOTE_BLOCK", BLOCK)
    source, target = Place(storages["memory", "from"]), Place(storages["local", "to"])
    wanted = {f"f{n}": DATA[: size * BLOCK + (size > 1)] for n, size in enumerate(sizes)}
    for name, data in wanted.items():
        put(source.storage, name, data)
    held = Held(monkeypatch)
    copy_files(source, target, [sealed(name, data) for name, data in wanted.items()], held.written)
    assert contents(target.storage) == wanted
    assert 64 << 20 == 8 * (8 << 20) == 2 * IN_FLIGHT * (8 << 20)
    assert held.most <= (8 + 2) * BLOCK


def test_a_full_disk_is_named(storages, monkeypatch):
    """Whichever block meets it; nothing is left."""

    def pwrite(descriptor, data, offset):
        raise OSError(28, "No space left on device")

    put(storages["local", "from"], "a", DATA)
    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(StorageFullError, match="no space left"):
        copy_files(Place(storages["local", "from"]), Place(storages["local", "to"]), [sealed()])
    assert contents(storages["local", "to"]) == {}


def test_one_that_fails_ends_the_others():
    """However many wait: none is begun after it, those under way are told, and the failure is what is raised."""
    begun, over = [], threading.Event()

    def act(file):
        begun.append(file.path)
        if file.path == "01":
            raise TransientError("503", key="01")
        assert over.wait(60)
        Pace().until(over).before()

    with pytest.raises(TransientError):
        for_each([sealed(f"{number:02d}") for number in range(50)], act, over)
    assert set(begun) <= {f"{number:02d}" for number in range(publish.FILES_AT_ONCE)}


def test_a_read_that_fails_ends_a_copy(storages, monkeypatch):
    """The failure is the storage's, no thread is left, and no half of a file."""
    source, target = Place(storages["memory", "from"].inner), Place(storages["local", "to"])
    for number in range(50):
        put(source.storage, f"{number:02d}", DATA)
    real = RemoteReader.read

    def fail(self, offset, length):
        if self.entry.key == "01":
            raise TransientError("503", key="01")
        return real(self, offset, length)

    monkeypatch.setattr(RemoteReader, "read", fail)
    with pytest.raises(TransientError):
        copy_files(source, target, [sealed(f"{n:02d}") for n in range(50)])
    assert set(contents(target.storage).values()) <= {DATA}
    assert "01" not in contents(target.storage)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ckptguard-publish")]


def test_the_largest_come_first():
    """And each result is there."""
    files = [sealed(str(size), b"x" * size) for size in (3, 1, 2)]
    assert for_each(files, lambda file: file.size, threading.Event()) == [3, 2, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_given_to_all_or_to_none(storages, kind):
    """Those that had theirs lose them; what has such a name already stays, and the temporary place goes."""
    storage = storages[kind, "to"]
    put(storage, "goal-b", b"another's")
    with staging(storage, ROLLBACK) as staged:
        for name in "ab":
            put(storage, staged.place.key(name), name.encode())
        with pytest.raises(ObjectExistsError):
            give_names(staged.place, [("a", "goal-a"), ("b", "goal-b")])
    assert contents(storage) == {"goal-b": b"another's"}
    with staging(storage, ROLLBACK) as staged:
        put(storage, staged.place.key("deep/a"), b"a")
        give_names(staged.place, [("", "whole")])
    assert contents(storage) == {"goal-b": b"another's", "whole/deep/a": b"a"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_save_that_comes_between_two_names_stays(storages, monkeypatch, kind):
    """What another process put there is not taken back with what was staged."""
    storage = storages[kind, "to"]
    real = type(storage).move

    def raced(self, source, target):
        if target == "goal-b":
            put(storage, "goal-a", b"another's")
            put(storage, "goal-b", b"another's")
        real(self, source, target)

    monkeypatch.setattr(type(storage), "move", raced)
    with staging(storage, ROLLBACK) as staged:
        for name in "ab":
            put(storage, staged.place.key(name), name.encode())
        with pytest.raises(ObjectExistsError):
            give_names(staged.place, [("a", "goal-a"), ("b", "goal-b")])
    assert contents(storage) == {"goal-a": b"another's", "goal-b": b"another's"}


def test_a_place_that_is_needed_or_cannot_be_removed_stays(storages, monkeypatch):
    """The next one finds it by its name."""
    storage = storages["memory", "to"].inner
    with staging(storage, ROLLBACK) as staged:
        put(storage, staged.place.key("a"), b"a")
        staged.needed = True
    assert list(contents(storage)) == [staged.place.key("a")]

    def refuse(self, key):
        raise TransientError("busy", key=key)

    monkeypatch.setattr(RemoteStorage, "remove", refuse)
    with staging(storage, ROLLBACK) as other:
        put(storage, other.place.key("b"), b"b")
    assert sorted(contents(storage)) == sorted([staged.place.key("a"), other.place.key("b")])
