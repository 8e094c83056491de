"""Uploads in parts that nobody will finish: no listing shows them, and a store keeps and bills them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from ckptguard.storage.failures import translated
from ckptguard.storage.protocol import Storage
from ckptguard.storage.remote.remote_storage import RemoteStorage
from ckptguard.storage.retrying import RetryingStorage

_MOST_PAGES = 1000


def end_uploads(storage: Storage, folder: str, begun_before: Callable[[], float | None] | None = None) -> list[str]:
    """Abort what was begun below a folder, before the Unix time that is asked for if there is anything; returns the
    keys.

    Only where a store lists them: Azure and Google drop such parts after a week by themselves, and elsewhere they are
    files that a listing shows. The caller knows that nobody writes there. StorageError. `folder` is not the root.
    """
    while isinstance(storage, RetryingStorage):
        storage = storage.inner
    if not isinstance(storage, RemoteStorage):
        return []
    if not storage.traits.lists_uploads:
        return []
    fs, path = storage.place(folder)
    bucket, prefix, _ = fs.split_path(path + "/")
    root = prefix.removesuffix(f"{folder}/")
    ended = []
    with translated(folder, storage.url):
        found = _listed(fs, bucket, prefix)
        if found and begun_before is not None:
            limit = begun_before()
            found = [u for u in found if limit is not None and u["Initiated"].timestamp() < limit]
        for upload in found:
            with contextlib.suppress(FileNotFoundError):  # finished meanwhile
                fs.call_s3("abort_multipart_upload", Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
            ended.append(upload["Key"].removeprefix(root))
    return ended


def _listed(fs: Any, bucket: str, prefix: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    marker: dict[str, str] = {}
    for _ in range(_MOST_PAGES):
        page = fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix, **marker)
        found += [u for u in page.get("Uploads") or () if u["Key"].startswith(prefix)]
        if not page.get("IsTruncated"):
            break
        marker = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page.get("NextUploadIdMarker") or ""}
    return found
