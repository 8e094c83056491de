"""How each kind of store assembles an object that is too large for one request.

`parts_for` chooses the way. Every way keeps the object invisible until `finish`, and `abandon` leaves nothing behind.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import secrets
from collections.abc import Callable
from typing import Any, Protocol

from ckptguard.storage.traits import StoreTraits
from ckptguard.values.temporary_names import RECORD


class MultipartUpload(Protocol):
    """One object in transfer. Several threads may call `put` if `parallel` is more than 1."""

    parallel: int

    def put(self, number: int, data: bytes) -> None:
        """Store part `number`, counted from 0."""

    def finish(self, *, exclusive: bool) -> None:
        """Join the parts. With `exclusive`, FileExistsError if the store can report that the key is taken."""

    def abandon(self) -> None:
        """Discard the parts."""


def parts_for(traits: StoreTraits, file_system: Any, path: str, *, exclusive: bool) -> MultipartUpload:
    """Return the way for this kind of store. `exclusive`: the object must be new."""
    if traits.multipart == "held":
        return HeldParts(file_system, path, exclusive=exclusive)
    ways: dict[str, Callable[[Any, str], MultipartUpload]]
    ways = {"parts": S3Parts, "blocks": AzureParts, "joined": JoinedParts, "moved": MovedParts}
    return ways[traits.multipart](file_system, path)


class JoinedParts:
    """For stores in memory: all parts in one put."""

    parallel = 1

    def __init__(self, file_system: Any, path: str) -> None:
        self._fs, self._path, self._data = file_system, path, bytearray()

    def put(self, number: int, data: bytes) -> None:
        self._data += data

    def finish(self, *, exclusive: bool) -> None:
        self._fs.pipe_file(self._path, bytes(self._data), mode="create" if exclusive else "overwrite")

    def abandon(self) -> None:
        self._data.clear()


class HeldParts:
    """For file systems that hide files until they are committed (fsspec's transactions)."""

    parallel = 1

    def __init__(self, file_system: Any, path: str, *, exclusive: bool) -> None:
        mode = "xb" if exclusive else "wb"
        self._file = file_system.open(path, mode, autocommit=False, block_size=8 << 20)

    def put(self, number: int, data: bytes) -> None:
        self._file.write(data)

    def finish(self, *, exclusive: bool) -> None:
        self._file.close()  # with `exclusive` it was opened exclusively
        self._file.commit()

    def abandon(self) -> None:
        with contextlib.suppress(Exception):
            self._file.discard()


class MovedParts:
    """For all others: a temporary object that is moved to its name, as atomically as the file system can."""

    parallel = 1

    def __init__(self, file_system: Any, path: str) -> None:
        folder, _, _ = path.rpartition("/")
        self._fs, self._path, self._temporary = file_system, path, f"{folder}/{RECORD.new()}"
        file_system.makedirs(folder, exist_ok=True)
        self._file = file_system.open(self._temporary, "wb")

    def put(self, number: int, data: bytes) -> None:
        self._file.write(data)

    def finish(self, *, exclusive: bool) -> None:
        self._file.close()
        if exclusive and self._fs.exists(self._path):
            raise FileExistsError(self._path)
        self._fs.mv(self._temporary, self._path)

    def abandon(self) -> None:
        for attempt in (self._file.close, lambda: self._fs.rm_file(self._temporary)):
            with contextlib.suppress(Exception):
                attempt()


class S3Parts:
    """S3's multipart upload. Nothing appears at the key before it is completed. Aborting frees its parts."""

    parallel = 4

    def __init__(self, file_system: Any, path: str) -> None:
        bucket, key, _ = file_system.split_path(path)
        self._fs, self._place = file_system, {"Bucket": bucket, "Key": key}
        begun = file_system.call_s3("create_multipart_upload", **self._place)
        self._upload = {**self._place, "UploadId": begun["UploadId"]}
        self._tags: dict[int, str] = {}

    def put(self, number: int, data: bytes) -> None:
        # botocore rewinds the body for a repetition; s3fs does not, and would send nothing.
        body = _Body(data) if self._fs.retries == 1 else data
        done = self._fs.call_s3("upload_part", **self._upload, PartNumber=number + 1, Body=body)
        self._tags[number + 1] = done["ETag"]

    def finish(self, *, exclusive: bool) -> None:
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in sorted(self._tags.items())]
        condition = {"IfNoneMatch": "*"} if exclusive else {}
        try:
            self._fs.call_s3("complete_multipart_upload", **self._upload, MultipartUpload={"Parts": parts}, **condition)
        except Exception:
            # The answer to a successful request can get lost, and its repetition then fails.
            if not self._is_there():
                raise

    def abandon(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.call_s3("abort_multipart_upload", **self._upload)

    def _is_there(self) -> bool:
        """True if the object at the key was joined from these parts."""
        try:
            tag = self._fs.call_s3("head_object", **self._place)["ETag"].strip('"')
            sums = b"".join(bytes.fromhex(tag.strip('"')) for _, tag in sorted(self._tags.items()))
        except (OSError, KeyError, ValueError):
            return False
        return bool(tag == f"{hashlib.md5(sums, usedforsecurity=False).hexdigest()}-{len(self._tags)}")


class _Body(io.BytesIO):
    """The bytes of a part. aiohttp takes the buffer to learn its length, for which a `BytesIO` copies all it has."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._data = data

    def getbuffer(self) -> memoryview:
        return memoryview(self._data)


class AzureParts:
    """Azure's blocks, staged and then committed as one list. Staged blocks are invisible and expire."""

    parallel = 4

    def __init__(self, file_system: Any, path: str) -> None:
        self._fs = file_system
        self._container, self._blob, _ = file_system.split_path(path)
        self._token = secrets.token_hex(8)  # all uploads of a key share one set of blocks
        self._ids: dict[int, str] = {}

    def put(self, number: int, data: bytes) -> None:
        name = base64.b64encode(f"{self._token}{number:08d}".encode()).decode()
        self._call("stage_block", block_id=name, data=io.BytesIO(data), length=len(data))
        self._ids[number] = name

    def finish(self, *, exclusive: bool) -> None:
        from azure.core import MatchConditions
        from azure.core.exceptions import HttpResponseError, ResourceExistsError
        from azure.storage.blob import BlobBlock

        blocks = [BlobBlock(name) for _, name in sorted(self._ids.items())]
        condition = {"match_condition": MatchConditions.IfMissing} if exclusive else {}
        try:
            self._call("commit_block_list", block_list=blocks, metadata={"is_directory": "false"}, **condition)
        except ResourceExistsError as error:
            raise FileExistsError(self._blob) from error
        except HttpResponseError as error:
            # The commit of another upload of this key discards the blocks of all.
            if exclusive and getattr(error, "error_code", None) == "InvalidBlockList":
                raise FileExistsError(self._blob) from error
            raise

    def abandon(self) -> None:
        """Do nothing: staged blocks cannot be removed, and expire after a week."""

    def _call(self, method: str, **arguments: Any) -> Any:
        import fsspec.asyn

        async def call() -> Any:
            client = self._fs.service_client.get_blob_client(container=self._container, blob=self._blob)
            async with client:
                return await getattr(client, method)(**arguments)

        return fsspec.asyn.sync(self._fs.loop, call)
