"""Azure's block blobs."""

from __future__ import annotations

import base64
import io
import secrets
from typing import Any


class AzureParts:
    """Blocks that are staged and then committed as one list. Staged blocks show nowhere and expire by themselves."""

    parallel = 4

    def __init__(self, file_system: Any, path: str) -> None:
        self._fs = file_system
        self._container, self._blob, _ = file_system.split_path(path)
        self._token = secrets.token_hex(8)  # all uploads of a key have one heap of blocks
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
            # The commit of another upload of this key throws away the blocks of all.
            if exclusive and getattr(error, "error_code", None) == "InvalidBlockList":
                raise FileExistsError(self._blob) from error
            raise

    def abandon(self) -> None:
        """Staged blocks cannot be removed: the store forgets them after a week."""

    def _call(self, method: str, **arguments: Any) -> Any:
        import fsspec.asyn

        async def call() -> Any:
            client = self._fs.service_client.get_blob_client(container=self._container, blob=self._blob)
            async with client:
                return await getattr(client, method)(**arguments)

        return fsspec.asyn.sync(self._fs.loop, call)
