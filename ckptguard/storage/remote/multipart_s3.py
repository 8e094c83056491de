"""S3's multipart uploads."""

from __future__ import annotations

import contextlib
import hashlib
import io
from typing import Any


class S3Parts:
    """One multipart upload. Until it is completed nothing shows under the key; aborted, its parts are freed."""

    parallel = 4

    def __init__(self, file_system: Any, path: str) -> None:
        bucket, key, _ = file_system.split_path(path)
        self._fs, self._place = file_system, {"Bucket": bucket, "Key": key}
        begun = file_system.call_s3("create_multipart_upload", **self._place)
        self._upload = {**self._place, "UploadId": begun["UploadId"]}
        self._tags: dict[int, str] = {}

    def put(self, number: int, data: bytes) -> None:
        # botocore rewinds what it sends again; s3fs does not, and would send nothing.
        body = _Body(data) if self._fs.retries == 1 else data
        done = self._fs.call_s3("upload_part", **self._upload, PartNumber=number + 1, Body=body)
        self._tags[number + 1] = done["ETag"]

    def finish(self, *, exclusive: bool) -> None:
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in sorted(self._tags.items())]
        condition = {"IfNoneMatch": "*"} if exclusive else {}
        try:
            self._fs.call_s3("complete_multipart_upload", **self._upload, MultipartUpload={"Parts": parts}, **condition)
        except Exception:
            # The answer to a request that succeeded can get lost, and its repetition then fails.
            if not self._is_there():
                raise

    def abandon(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.call_s3("abort_multipart_upload", **self._upload)

    def _is_there(self) -> bool:
        """Whether the object under the key was joined from these very parts."""
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
