"""The contract of `Storage`: one class that every implementation inherits, with the laws of its other files.

A new storage supplies the fixture `storage` and three raw helpers that bypass it, so that the storage itself is
tested.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckptguard.errors import ChangedWhileReadError, DeniedError, ObjectExistsError, ObjectMissingError
from ckptguard.storage import Storage
from ckptguard.testing.storage_trouble import HonestyLaws, NameLaws, SharedLaws, UploadLaws, keys, winners


class StorageContract(UploadLaws, SharedLaws, NameLaws, HonestyLaws):
    """What holds for every storage."""

    def absent(self) -> Storage:
        """A storage whose root does not exist."""
        raise NotImplementedError

    def test_create_writes_the_bytes(self, storage: Storage) -> None:
        """A created object holds exactly its bytes, whatever folders were missing."""
        storage.create("a/b/c.bin", b"\0\xff" * 70_000)
        assert self.get_raw(storage, "a/b/c.bin") == b"\0\xff" * 70_000

    def test_create_can_write_nothing(self, storage: Storage) -> None:
        """An empty object is an object."""
        storage.create("empty", b"")
        assert storage.stat("empty").size == 0
        with storage.open("empty") as reader:
            assert reader.read(0, 0) == b""

    def test_create_makes_the_root(self) -> None:
        """Creating the first object makes an absent root."""
        storage = self.absent()
        storage.create("first", b"1")
        assert keys(storage.list()) == ["first"]

    def test_create_never_replaces(self, storage: Storage) -> None:
        """A taken key stays as it was."""
        self.put_raw(storage, "k", b"old")
        with pytest.raises(ObjectExistsError) as caught:
            storage.create("k", b"new")
        assert (self.get_raw(storage, "k"), caught.value.key) == (b"old", "k")

    def test_create_does_not_take_a_folder(self, storage: Storage) -> None:
        """A key that is a folder is taken, where folders are things of their own; elsewhere both may be there."""
        self.put_raw(storage, "folder/inside", b"1")
        try:
            storage.create("folder", b"new")
        except ObjectExistsError:
            assert keys(storage.list(recursive=True)) == ["folder/inside"]
        else:
            assert not storage.capabilities().folders
            assert keys(storage.list(recursive=True)) == ["folder", "folder/inside"]

    def test_racing_creators_have_one_winner(self, storage: Storage) -> None:
        """Of eight racers exactly one wins, and the object is the winner's, whole."""

        def create(key: str, data: bytes, wait: Callable[[], int]) -> None:
            wait()
            storage.create(key, data)

        for key in ("race-0", "race-1", "race-2", "race-3"):
            bodies = [secrets.token_bytes(5000) for _ in range(8)]
            assert winners(bodies, functools.partial(create, key)) == [self.get_raw(storage, key)]

    def test_creating_leaves_nothing_else_behind(self, storage: Storage) -> None:
        """Neither success nor a conflict leaves a temporary object."""
        storage.create("k", b"1")
        with pytest.raises(ObjectExistsError):
            storage.create("k", b"2")
        assert keys(storage.list(recursive=True)) == ["k"]

    def test_listing_one_level(self, storage: Storage) -> None:
        """One level holds files and folders, sorted by key."""
        for key in ("b", "a/x", "a/y/z", "a.txt"):
            self.put_raw(storage, key, b"1")
        assert [(e.key, e.kind) for e in storage.list()] == [("a", "folder"), ("a.txt", "file"), ("b", "file")]
        assert keys(storage.list("a")) == ["a/x", "a/y"]

    def test_listing_recursively(self, storage: Storage) -> None:
        """A recursive listing holds no folders and sees what was written a moment ago."""
        for key in ("b", "a/x", "a/y/z"):
            self.put_raw(storage, key, b"1")
        assert keys(storage.list(recursive=True)) == ["a/x", "a/y/z", "b"]
        self.put_raw(storage, "a/later", b"1")
        assert keys(storage.list("a", recursive=True)) == ["a/later", "a/x", "a/y/z"]

    def test_listing_enters_only_what_is_wanted(self, storage: Storage) -> None:
        """What lies in a folder that `enter` refuses is not returned."""
        for key in ("a/x", "no/x", "a/no/x", "a/yes/no/x", "a/yes/x"):
            self.put_raw(storage, key, b"1")
        found = storage.list(recursive=True, enter=lambda key: not key.endswith("no"))
        assert keys(found) == ["a/x", "a/yes/x"]

    def test_an_absent_folder_is_empty_and_an_absent_root_an_error(self, storage: Storage) -> None:
        """No folder reads as empty; no root never does."""
        self.put_raw(storage, "file", b"1")
        assert storage.list("nowhere") == storage.list("no/where", recursive=True) == storage.list("file") == []
        for prefix in ("", "nowhere"):
            with pytest.raises(ObjectMissingError):
                self.absent().list(prefix)

    def test_a_name_that_begins_alike_is_not_inside(self, storage: Storage) -> None:
        """`a1/x` is not below `a`."""
        self.put_raw(storage, "a/x", b"1")
        self.put_raw(storage, "a1/x", b"1")
        assert keys(storage.list("a", recursive=True)) == ["a/x"]
        storage.remove("a")
        assert keys(storage.list(recursive=True)) == ["a1/x"]

    def test_stat(self, storage: Storage) -> None:
        """A stat says the same as the listing; what is not there is missing."""
        self.put_raw(storage, "a/x", b"123")
        assert [storage.stat("a/x")] == storage.list("a")
        assert storage.stat("a/x").size == 3
        assert (storage.stat("a").kind, storage.stat("").kind) == ("folder", "folder")
        for key in ("b", "a/x/y", "b/c"):
            with pytest.raises(ObjectMissingError):
                storage.stat(key)
        with pytest.raises(ObjectMissingError):
            self.absent().stat("")

    def test_a_changed_object_has_another_signature(self, storage: Storage) -> None:
        """Replacing an object by one of another size changes its signature."""
        self.put_raw(storage, "k", b"123")
        before = storage.stat("k").signature
        assert storage.stat("k").signature == before
        self.put_raw(storage, "k", b"1234")
        assert storage.stat("k").signature != before

    def test_reading_ranges(self, storage: Storage) -> None:
        """Ranges come back exactly, into new bytes and into a given buffer, from several threads."""
        data = secrets.token_bytes(100_000)
        self.put_raw(storage, "k", data)
        with storage.open("k") as reader:
            assert reader.entry == storage.stat("k")
            assert (reader.read(0, 10), reader.read(99_990, 10)) == (data[:10], data[-10:])
            buffer = bytearray(50_000)
            reader.read_into(25_000, memoryview(buffer))
            assert bytes(buffer) == data[25_000:75_000]
            places = [*range(0, 90_000, 9_773)] * 4
            with ThreadPoolExecutor(4) as threads:
                found = list(threads.map(lambda place: reader.read(place, 977), places))
            assert found == [data[place : place + 977] for place in places]
            reader.done_with(0, 100_000)
            reader.check_unchanged()

    def test_reading_past_the_end(self, storage: Storage) -> None:
        """Less than asked for is never returned, and a huge length costs no memory."""
        self.put_raw(storage, "k", b"1234")
        with storage.open("k") as reader:
            for offset, length in ((0, 5), (4, 1), (10, 1), (0, 1 << 60)):
                with pytest.raises(ChangedWhileReadError):
                    reader.read(offset, length)
            with pytest.raises(ChangedWhileReadError):
                reader.read_into(2, memoryview(bytearray(3)))

    def test_a_replaced_object_is_noticed(self, storage: Storage) -> None:
        """`check_unchanged` notices another object under the key, and none."""
        self.put_raw(storage, "k", b"1234")
        with storage.open("k") as reader:
            self.put_raw(storage, "k", b"12345")
            with pytest.raises(ChangedWhileReadError):
                reader.check_unchanged()
        with storage.open("k") as reader:
            storage.remove("k")
            with pytest.raises(ChangedWhileReadError) as caught:
                reader.check_unchanged()
        assert caught.value.key == "k"

    def test_closing_twice(self, storage: Storage) -> None:
        """A second close does nothing."""
        self.put_raw(storage, "k", b"1")
        reader = storage.open("k")
        reader.close()
        reader.close()

    def test_opening_what_is_no_file(self, storage: Storage) -> None:
        """A folder is refused, an absent key is missing."""
        self.put_raw(storage, "a/x", b"1")
        with pytest.raises(DeniedError):
            storage.open("a")
        with pytest.raises(ObjectMissingError):
            storage.open("b")

    @pytest.mark.parametrize("how", ["copy", "clone", "link"])
    def test_copy(self, storage: Storage, how: str) -> None:
        """A copy has the source's bytes and never replaces."""
        data = secrets.token_bytes(200_000)
        self.put_raw(storage, "a/x", data)
        done = storage.copy("a/x", "k/l/y", how=how)
        assert done in {"copy": {"copy"}, "clone": {"copy", "reflink"}, "link": {"copy", "reflink", "link"}}[how]
        assert self.get_raw(storage, "k/l/y") == self.get_raw(storage, "a/x") == data
        self.put_raw(storage, "other", b"other")
        with pytest.raises(ObjectExistsError):
            storage.copy("a/x", "other", how=how)
        assert self.get_raw(storage, "other") == b"other"
        with pytest.raises(ObjectMissingError):
            storage.copy("nowhere", "z", how=how)
        assert keys(storage.list(recursive=True)) == ["a/x", "k/l/y", "other"]

    @pytest.mark.parametrize("how", ["copy", "clone"])
    def test_a_copy_is_independent(self, storage: Storage, how: str) -> None:
        """Changing the source in place leaves a copy alone."""
        self.put_raw(storage, "x", b"1234")
        storage.copy("x", "y", how=how)
        self.put_raw(storage, "x", b"damage")
        assert self.get_raw(storage, "y") == b"1234"

    def test_move_file_and_folder(self, storage: Storage) -> None:
        """A moved file or folder is wholly at its new key and not at the old one."""
        for key in ("a/x", "a/b/y", "single"):
            self.put_raw(storage, key, key.encode())
        storage.move("a", "new/place/a")
        storage.move("single", "new/single")
        assert keys(storage.list(recursive=True)) == ["new/place/a/b/y", "new/place/a/x", "new/single"]
        assert self.get_raw(storage, "new/place/a/b/y") == b"a/b/y"

    def test_move_never_replaces(self, storage: Storage) -> None:
        """A taken target keeps both sides as they were."""
        for key in ("a/x", "b/x", "f", "g"):
            self.put_raw(storage, key, key.encode())
        for source, target in (("a", "b"), ("f", "g"), ("f", "b"), ("a", "f")):
            with pytest.raises(ObjectExistsError):
                storage.move(source, target)
        assert keys(storage.list(recursive=True)) == ["a/x", "b/x", "f", "g"]
        with pytest.raises(ObjectMissingError):
            storage.move("nowhere", "z")

    def test_remove(self, storage: Storage) -> None:
        """Files and folders go; removing what is absent is no error."""
        for key in ("a/x", "a/b/c/y", "f", "stays"):
            self.put_raw(storage, key, b"1")
        for key in ("a", "f", "nowhere", "no/where"):
            storage.remove(key)
        assert keys(storage.list()) == ["stays"]

    def test_the_root_is_not_removed(self, storage: Storage) -> None:
        """Removing the root itself is refused."""
        self.put_raw(storage, "k", b"1")
        with pytest.raises(DeniedError):
            storage.remove("")
        assert keys(storage.list()) == ["k"]

    @pytest.mark.parametrize("key", ["..", "../x", "a/../../x", "/etc/passwd", "a//b", "./a", "a/", "a\0b", "\udcff"])
    def test_keys_that_lead_elsewhere_are_refused(self, storage: Storage, key: str) -> None:
        """No method takes a key that is not one."""
        self.put_raw(storage, "k", b"1")
        for attempt in (
            lambda: storage.stat(key),
            lambda: storage.open(key),
            lambda: storage.list(key),
            lambda: storage.create(key, b"1"),
            lambda: storage.remove(key),
            lambda: storage.copy("k", key),
            lambda: storage.copy(key, "z"),
            lambda: storage.move("k", key),
        ):
            with pytest.raises(DeniedError):
                attempt()
        assert keys(storage.list(recursive=True)) == ["k"]
