"""Laws of writing: uploads of any length, and what racing writers may rely on."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable

import pytest

from ckptguard.errors import ObjectExistsError, ObjectMissingError
from ckptguard.storage import Storage

LARGE = 17 << 20  # more than two parts, and no whole number of them
BLOCK = (1 << 20) + 1


class UploadLaws:
    """What holds for uploads to every storage."""

    put_raw: Callable[[Storage, str, bytes], None]
    get_raw: Callable[[Storage, str], bytes]

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
        assert [e.key for e in storage.list(recursive=True)] == ["a/b/k"]

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
        assert [e.key for e in storage.list(recursive=True)] == ["other"]

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
        assert [e.key for e in storage.list(recursive=True)] == ["folder/inside", "late", "taken"]

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
        for size in (10, LARGE):
            barrier, won, bodies = threading.Barrier(2), list[bytes](), [bytes([n]) * size for n in (1, 2)]

            def race(
                data: bytes, key: str = f"k{size}", barrier: threading.Barrier = barrier, won: list[bytes] = won
            ) -> None:
                with storage.upload(key) as upload:
                    upload.write(data)
                    barrier.wait()
                    try:
                        upload.commit()
                    except ObjectExistsError:
                        return
                won.append(data)

            racers = [threading.Thread(target=race, args=(body,)) for body in bodies]
            for racer in racers:
                racer.start()
            for racer in racers:
                racer.join()
            assert self.get_raw(storage, f"k{size}") in won
            assert len(won) == 1 or (not exclusive and len(won) == 2)
