"""A look at an object store: one listing answers as the store itself would, also after what the look does itself."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections import Counter
from types import TracebackType

import pytest
from support.counting_storage import CountingStorage

from ckptguard.errors import CkptguardError, DeniedError, ObjectExistsError, ObjectMissingError
from ckptguard.storage.protocol import Capabilities, Enter, Entry, Reader, Storage, Upload
from ckptguard.storage.remote import listed_storage
from ckptguard.storage.remote.listed_storage import ListedRun
from ckptguard.values.ids import RECORDS_FOLDER

_CLOCK = itertools.count(1)
Objects = dict[str, tuple[bytes, int]]  # by their whole names, each with the time of its writing


class FlatStore(Storage):
    """What lies below a prefix of some objects, which other storages may share."""

    def __init__(self, objects: Objects, prefix: str = "") -> None:
        self.url, self.objects, self.prefix = f"flat://{prefix}", objects, prefix

    def _entry(self, key: str) -> Entry:
        data, at = self.objects[self.prefix + key]
        tag = hashlib.md5(data, usedforsecurity=False).hexdigest()
        return Entry(key=key, kind="file", size=len(data), mtime_ns=at * 10**9, etag=f'"{tag}"')

    def _below(self, folder: str) -> list[str]:
        start = self.prefix + (f"{folder}/" if folder else "")
        return [name.removeprefix(self.prefix) for name in self.objects if name.startswith(start)]

    def list(
        self, prefix: str = "", *, recursive: bool = False, enter: Enter | None = None, unread: bool = False
    ) -> list[Entry]:
        if not self._below(""):
            raise ObjectMissingError("nothing is there", key="")
        start, found = f"{prefix}/" if prefix else "", {}
        for key in self._below(prefix):
            first, deeper, _ = key.removeprefix(start).partition("/")
            if deeper and not recursive:
                found[start + first, "folder"] = Entry(key=start + first, kind="folder")
            elif recursive or not deeper:
                found[key, "file"] = self._entry(key)
        return [found[one] for one in sorted(found)]

    def stat(self, key: str) -> Entry:
        if key and self.prefix + key in self.objects:
            return self._entry(key)
        if not self._below(key):
            raise ObjectMissingError("nothing is there", key=key)
        return Entry(key=key, kind="folder")

    def open(self, key: str) -> Reader:
        if self.stat(key).kind != "file":
            raise DeniedError("a folder", key=key)
        return _Bytes(self._entry(key), self.objects[self.prefix + key][0])

    def create(self, key: str, data: bytes) -> None:
        if self.prefix + key in self.objects:
            raise ObjectExistsError("taken", key=key)
        self._put(key, data)

    def _put(self, key: str, data: bytes) -> None:
        self.objects[self.prefix + key] = data, next(_CLOCK)

    def upload(self, key: str, *, replace: bool = False) -> Upload:
        return _Sending(self, key, replace=replace)

    def copy(self, source: str, target: str, *, how: str = "copy") -> str:
        with self.open(source) as reader:
            if self.prefix + target in self.objects or self._below(target):
                raise ObjectExistsError("taken", key=target)
            self._put(target, reader.read(0, reader.entry.size))
        return "copy"

    def move(self, source: str, target: str) -> None:
        moved = [source] if self.prefix + source in self.objects else self._below(source)
        if not moved:
            raise ObjectMissingError("nothing is there", key=source)
        if self.prefix + target in self.objects or self._below(target):
            raise ObjectExistsError("taken", key=target)
        for key in moved:
            self._put(target + key.removeprefix(source), self.objects[self.prefix + key][0])
        self.remove(source)

    def remove(self, key: str) -> None:
        for name in (key, *self._below(key)):
            self.objects.pop(self.prefix + name, None)

    def capabilities(self) -> Capabilities:
        return Capabilities(
            exclusive_create=True, exclusive_upload=True, links=False, folders=False, etags=True, any_name=True
        )


class _Bytes(Reader):
    def __init__(self, entry: Entry, data: bytes) -> None:
        self.entry, self._data = entry, data

    def read(self, offset: int, length: int) -> bytes:
        return self._data[offset : offset + length]

    def read_into(self, offset: int, buffer: memoryview) -> None:
        buffer[:] = self.read(offset, len(buffer))

    def check_unchanged(self) -> None:
        pass

    def done_with(self, offset: int, length: int) -> None:
        pass

    def close(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Sending(Upload):
    def __init__(self, store: FlatStore, key: str, *, replace: bool) -> None:
        self._store, self._key, self._replace, self._data = store, key, replace, b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._data += bytes(data)

    def commit(self) -> None:
        if self._replace:
            self._store._put(self._key, self._data)
        else:
            self._store.create(self._key, self._data)

    def abort(self) -> None:
        pass


NAMES = ("a", "a/b", "a/b/c", "ab", "ab/x", "d/e", "d/f", "z")


class Stage:
    """The storages of a run, and the same as a look sees them."""

    def __init__(self) -> None:
        objects: Objects = {}
        self.storage, self.records = FlatStore(objects), FlatStore(objects, f"{RECORDS_FOLDER}/")
        self.storage.create("keep", b"the run exists")
        self.records.create("keep", b"the records exist")
        self.listed = ListedRun(self.storage, self.records, RECORDS_FOLDER)

    @property
    def pairs(self) -> list[tuple[Storage, Storage]]:
        """What answers from the listing, and what is asked itself."""
        return [(self.listed.storage, self.storage), (self.listed.records, self.records)]


@pytest.fixture
def stage() -> Stage:
    """A new one."""
    return Stage()


def told(storage: Storage, key: str) -> list[object]:
    """What a storage says about a key: without times, which nobody knows of what was just written."""

    def said(ask: object) -> object:
        try:
            return ask()  # type: ignore[operator]
        except CkptguardError as error:
            return type(error)

    def read() -> bytes:
        with storage.open(key) as reader:
            return reader.read(0, reader.entry.size)

    def kinds(*, recursive: bool) -> list[tuple[str, str, int]]:
        return [(e.key, e.kind, e.size) for e in storage.list(key, recursive=recursive)]

    return [
        said(lambda: storage.stat(key).kind),
        said(read),
        said(lambda: kinds(recursive=True)),
        said(lambda: kinds(recursive=False)),
        said(lambda: sorted(storage.names(key))),
    ]


def act(chance: random.Random, storage: Storage) -> None:
    """Do something, which may fail."""
    key, other = chance.sample(NAMES, 2)
    what = chance.choice(("create", "remove", "copy", "move", "upload", "replace"))
    try:
        if what == "create":
            storage.create(key, chance.randbytes(4))
        elif what == "remove":
            storage.remove(key)
        elif what == "copy":
            storage.copy(key, other)
        elif what == "move":
            storage.move(key, other)
        else:
            with storage.upload(key, replace=what == "replace") as upload:
                upload.write(chance.randbytes(5))
                upload.commit()
    except CkptguardError:
        pass


@pytest.mark.parametrize("page", [1, 1000], ids=["many-pages", "one-page"])
@pytest.mark.parametrize("seed", range(20))
def test_what_a_look_does_it_sees(stage: Stage, monkeypatch: pytest.MonkeyPatch, seed: int, page: int) -> None:
    """After each of its own steps, it answers as the store does."""
    monkeypatch.setattr(listed_storage, "PAGE", page)
    chance = random.Random(seed)
    with stage.listed.look():
        for _ in range(40):
            listed, _ = chance.choice(stage.pairs)
            act(chance, listed)
            for ours, real in stage.pairs:
                for key in ("", *NAMES):
                    assert told(ours, key) == told(real, key), (seed, key)


@pytest.mark.parametrize("page", [1, 1000], ids=["many-pages", "one-page"])
@pytest.mark.parametrize("seed", range(10))
def test_what_others_do_is_seen_after_a_renewal(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, seed: int, page: int
) -> None:
    """A renewed folder, and what lies beside it, are as the store has them; and so is everything in the next look."""
    monkeypatch.setattr(listed_storage, "PAGE", page)
    chance = random.Random(seed)
    with stage.listed.look():
        for _ in range(10):
            for _, real in stage.pairs:
                act(chance, real)
            for ours, real in stage.pairs:
                ours.renew("a", beside="")
                for key in ("a", "a/b", "a/b/c", "ab", "z"):
                    assert told(ours, key)[:2] == told(real, key)[:2] or key == "ab"
                assert told(ours, "a") == told(real, "a")
    for _, real in stage.pairs:
        act(chance, real)
    with stage.listed.look():
        for ours, real in stage.pairs:
            for key in ("", *NAMES):
                assert told(ours, key) == told(real, key)


def test_a_look_lists_once_and_asks_nothing_else(stage: Stage) -> None:
    """Listings, existence and sizes come from one listing."""
    asked: Counter[str] = Counter()
    counting = (CountingStorage(one, "store", asked) for one in (stage.storage, stage.records))
    listed = ListedRun(*counting, RECORDS_FOLDER)  # type: ignore[arg-type]
    stage.storage.create("a/b", b"12")
    with listed.look():
        assert [e.key for e in listed.storage.list("a")] == ["a/b"]
        assert listed.storage.stat("a/b").size == 2
        assert listed.storage.stat("a").kind == "folder"
        assert listed.records.names("") == ["keep"]
        with pytest.raises(ObjectMissingError):
            listed.records.stat("nothing")
        with pytest.raises(ObjectMissingError):
            listed.storage.open("nothing")
    assert asked == {"store.list": 1}


def test_outside_of_a_look_everything_is_asked(stage: Stage) -> None:
    """Nothing is remembered between two looks."""
    with stage.listed.look():
        stage.listed.storage.create("mine", b"1")
    stage.storage.remove("mine")
    stage.storage.create("theirs", b"2")
    assert [e.key for e in stage.listed.storage.list("")] == [RECORDS_FOLDER, "keep", "theirs"]
    with pytest.raises(ObjectMissingError):
        stage.listed.storage.stat("mine")
    with pytest.raises(ObjectExistsError):
        stage.listed.storage.create("theirs", b"3")


def test_who_lost_a_race_sees_the_winner(stage: Stage) -> None:
    """A record that another process created since the listing is found once ours is refused."""
    with stage.listed.look():
        stage.records.create("claim", b"theirs")
        with pytest.raises(ObjectExistsError):
            stage.listed.records.create("claim", b"ours")
        with stage.listed.records.open("claim") as reader:
            assert reader.read(0, 6) == b"theirs"


def test_now_asks_the_store(stage: Stage) -> None:
    """Whoever removes what others made asks for what is there now."""
    with stage.listed.look():
        stage.storage.create("late", b"1")
        with pytest.raises(ObjectMissingError):
            stage.listed.storage.stat("late")
        assert stage.listed.storage.now().stat("late").size == 1
