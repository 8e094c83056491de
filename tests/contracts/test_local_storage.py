"""A local folder keeps the contract of `Storage`, and what only a local file system can get wrong."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

import pytest

from ckptguard.errors import (
    ChangedWhileReadError,
    DeniedError,
    ObjectExistsError,
    StorageError,
    StorageFullError,
)
from ckptguard.storage import Storage, open_storage
from ckptguard.storage.local import writes as local_writes
from ckptguard.testing.storage_contract import StorageContract
from ckptguard.testing.storage_trouble import keys


class TestLocalStorage(StorageContract):
    """A local folder."""

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        (tmp_path / "root").mkdir()
        return open_storage(tmp_path / "root")

    def absent(self) -> Storage:
        return open_storage(self.tmp_path / "absent" / "below", must_exist=False)

    def put_raw(self, storage: Storage, key: str, data: bytes) -> None:
        path = Path(str(storage.root), key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def get_raw(self, storage: Storage, key: str) -> bytes:
        return Path(str(storage.root), key).read_bytes()

    def test_links_are_entries_and_never_ways(self, storage: Storage) -> None:
        """A link is listed with its target; nothing reads, writes or removes through it."""
        root, outside = self.tmp_path / "root", self.tmp_path / "outside"
        outside.mkdir()
        (outside / "secret").write_bytes(b"secret")
        (root / "folder").symlink_to("../outside")
        (root / "file").symlink_to("../outside/secret")
        found = storage.list(recursive=True)
        assert [(e.key, e.kind, e.target) for e in found] == [
            ("file", "link", "../outside/secret"),
            ("folder", "link", "../outside"),
        ]
        for attempt in (
            lambda: storage.open("file"),
            lambda: storage.open("folder/secret"),
            lambda: storage.list("folder"),
            lambda: storage.stat("folder/secret"),
            lambda: storage.create("folder/new", b"1"),
            lambda: storage.remove("folder/secret"),
            lambda: storage.copy("file", "copy"),
            lambda: storage.copy("file", "copy", how="link"),
        ):
            with pytest.raises(DeniedError):
                attempt()
        with pytest.raises(ObjectExistsError):
            storage.create("file", b"1")
        storage.remove("folder")
        storage.remove("file")
        assert [p.name for p in outside.iterdir()] == ["secret"]
        assert (outside / "secret").read_bytes() == b"secret"

    def test_a_link_inside_a_removed_folder_is_not_followed(self, storage: Storage) -> None:
        """Removing a folder removes the links in it, not what they point to."""
        root, outside = self.tmp_path / "root", self.tmp_path / "outside"
        outside.mkdir()
        (outside / "kept").write_bytes(b"1")
        (root / "a" / "b").mkdir(parents=True)
        (root / "a" / "b" / "link").symlink_to(outside)
        storage.remove("a")
        assert (outside / "kept").exists()
        assert storage.list() == []

    def test_the_root_may_be_a_link(self, storage: Storage) -> None:
        """The user named the root, so a link there is followed."""
        self.put_raw(storage, "k", b"1")
        (self.tmp_path / "alias").symlink_to("root")
        assert keys(open_storage(self.tmp_path / "alias").list()) == ["k"]

    def test_special_files_are_listed_and_never_opened(self, storage: Storage) -> None:
        """A FIFO or socket blocks nobody: it is an entry of kind "other" that cannot be opened."""
        root = self.tmp_path / "root"
        os.mkfifo(root / "fifo")
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(root / "socket"))
            assert [(e.key, e.kind) for e in storage.list()] == [("fifo", "other"), ("socket", "other")]
            for key in ("fifo", "socket"):
                with pytest.raises(DeniedError):
                    storage.open(key)
        storage.remove("fifo")
        assert keys(storage.list()) == ["socket"]

    def test_names_in_no_encoding_are_listed_escaped(self, storage: Storage) -> None:
        """A name that is not UTF-8 becomes an entry of kind "unnamed" whose key can be encoded."""
        root = os.fsencode(self.tmp_path / "root")
        with open(root + b"/bad\xff.pt", "wb") as file:
            file.write(b"1")
        os.mkdir(root + b"/dir\xfe")
        found = storage.list(recursive=True)
        assert [(e.key.encode(), e.kind) for e in found] == [
            (b"bad\\udcff.pt", "unnamed"),
            (b"dir\\udcfe", "unnamed"),
        ]

    def test_a_very_deep_folder_ends_nothing(self, storage: Storage) -> None:
        """Folders nested beyond reason are listed as "other", and can be removed."""
        here = os.open(self.tmp_path / "root", os.O_RDONLY)
        for _ in range(1500):
            os.mkdir("d", dir_fd=here)
            below = os.open("d", os.O_RDONLY, dir_fd=here)
            os.close(here)
            here = below
        os.close(here)
        before = len(os.listdir("/proc/self/fd"))
        assert [e.kind for e in storage.list(recursive=True)] == ["other"]
        storage.remove("d")
        assert storage.list() == []
        assert len(os.listdir("/proc/self/fd")) == before

    def test_modes(self, storage: Storage) -> None:
        """New objects follow the umask; a copy keeps its source's mode and drops set-id bits."""
        before = os.umask(0o027)
        try:
            storage.create("k", b"1")
        finally:
            os.umask(before)
        path = self.tmp_path / "root"
        assert stat.S_IMODE((path / "k").stat().st_mode) == 0o640
        (path / "k").chmod(0o4604)
        storage.copy("k", "l")
        assert stat.S_IMODE((path / "l").stat().st_mode) == 0o604

    def test_a_copy_has_a_fresh_time(self, storage: Storage) -> None:
        """A trainer that looks for the newest file finds the copy."""
        self.put_raw(storage, "k", b"1")
        os.utime(self.tmp_path / "root" / "k", (1, 1))
        storage.copy("k", "l")
        assert (storage.stat("l").mtime_ns or 0) > 10**18

    def test_a_truncated_file_is_noticed(self, storage: Storage) -> None:
        """A file that shrinks under the reader raises, and is no shorter answer."""
        self.put_raw(storage, "k", b"x" * 100_000)
        with storage.open("k") as reader:
            os.truncate(self.tmp_path / "root" / "k", 10)
            with pytest.raises(ChangedWhileReadError):
                reader.read(0, 100_000)
            with pytest.raises(ChangedWhileReadError):
                reader.check_unchanged()

    def test_a_write_of_equal_size_is_noticed(self, storage: Storage) -> None:
        """Writing in place changes the signature even at equal size."""
        self.put_raw(storage, "k", b"1234")
        os.utime(self.tmp_path / "root" / "k", (1, 1))
        with storage.open("k") as reader:
            self.put_raw(storage, "k", b"4321")
            with pytest.raises(ChangedWhileReadError):
                reader.check_unchanged()

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
    def test_no_permission_is_denied(self, storage: Storage) -> None:
        """An unreadable folder or file is a denial, never an absence."""
        self.put_raw(storage, "a/x", b"1")
        (self.tmp_path / "root" / "a" / "x").chmod(0)
        with pytest.raises(DeniedError):
            storage.open("a/x")
        (self.tmp_path / "root" / "a").chmod(0)
        try:
            with pytest.raises(DeniedError):
                storage.list(recursive=True)
        finally:
            (self.tmp_path / "root" / "a").chmod(0o755)

    def test_an_unreadable_folder_fails_the_listing(self, storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
        """A folder that the system refuses to open makes the whole listing an error."""
        self.put_raw(storage, "a/x", b"1")
        real = os.open

        def refuse(path: object, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            if path == "a":
                raise PermissionError(errno.EACCES, "Permission denied")
            return real(path, flags, mode, dir_fd=dir_fd)  # type: ignore[arg-type]

        monkeypatch.setattr(os, "open", refuse)
        with pytest.raises(DeniedError):
            storage.list(recursive=True)

    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
    def test_a_full_disk_says_so(self, storage: Storage, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
        """No space left is its own error, and nothing stays behind."""
        self.put_raw(storage, "source", b"1")

        def full(*_: object) -> int:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, "pwrite", full)
        for attempt in (lambda: storage.create("a/k", b"data"), lambda: storage.copy("source", "a/l")):
            with pytest.raises(StorageFullError, match="no space left"):
                attempt()
        monkeypatch.undo()
        assert keys(storage.list(recursive=True)) == ["source"]

    def test_an_input_output_error_is_no_absence(self, storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
        """EIO while reading is a storage error: it could not be told."""
        self.put_raw(storage, "k", b"1234")

        def broken(*_: object) -> int:
            raise OSError(errno.EIO, "Input/output error")

        with storage.open("k") as reader:
            monkeypatch.setattr(os, "pread", broken)
            with pytest.raises(StorageError) as caught:
                reader.read(0, 4)
        assert (type(caught.value), caught.value.key) == (StorageError, "k")

    @pytest.mark.parametrize("renames", [True, False])
    def test_a_file_system_without_hard_links(
        self, storage: Storage, monkeypatch: pytest.MonkeyPatch, renames: bool
    ) -> None:
        """Creating, copying and moving stay exclusive and whole where links, and even renameat2, are missing."""

        def refused(*_: object, **__: object) -> None:
            raise OSError(errno.EPERM, "Operation not permitted")

        def unsupported(*_: object) -> None:
            raise OSError(errno.ENOSYS, "Function not implemented")

        monkeypatch.setattr(os, "link", refused)
        if not renames:
            monkeypatch.setattr(local_writes, "rename_exclusively", unsupported)
        self.test_racing_creators_have_one_winner(storage)
        storage.create("a/x", b"1")
        assert storage.copy("a/x", "k", how="link") in ("copy", "reflink")
        with pytest.raises(ObjectExistsError):
            storage.create("a/x", b"2")
        for source, target in (("a", "k"), ("k", "a"), ("k", "a/x")):
            with pytest.raises(ObjectExistsError):
                storage.move(source, target)
        storage.move("a", "b")
        assert self.get_raw(storage, "b/x") == b"1"
        assert [e.key for e in storage.list(recursive=True) if ".tmp" in e.key] == []

    def test_moving_to_another_file_system_is_an_error(self, storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
        """A move is one rename; where that cannot be, it fails and changes nothing."""
        self.put_raw(storage, "k", b"1")

        def across(*_: object) -> None:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

        monkeypatch.setattr(local_writes, "rename_exclusively", across)
        with pytest.raises(StorageError):
            storage.move("k", "l")
        assert keys(storage.list()) == ["k"]

    def test_a_source_that_changes_is_not_copied(self, storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
        """A copy that was overtaken by a writer never gets its final name."""
        self.put_raw(storage, "k", b"1234")
        os.utime(self.tmp_path / "root" / "k", (1, 1))
        real = os.pread

        def pread(descriptor: int, length: int, offset: int) -> bytes:
            data = real(descriptor, length, offset)
            self.put_raw(storage, "k", b"5678")
            return data

        monkeypatch.setattr(os, "pread", pread)
        with pytest.raises(ChangedWhileReadError):
            storage.copy("k", "l")
        assert keys(storage.list()) == ["k"]

    def test_rename_exclusively_replaces_nothing(self) -> None:
        """The system call itself keeps what is there."""
        folder = os.open(self.tmp_path, os.O_RDONLY)
        try:
            for name in ("a", "b"):
                (self.tmp_path / name).write_text(name)
            with pytest.raises(FileExistsError):
                local_writes.rename_exclusively(folder, "a", folder, "b")
        finally:
            os.close(folder)
        assert (self.tmp_path / "b").read_text() == "b"
