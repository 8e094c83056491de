"""Azure's blob store as Microsoft emulates it: Azurite, a program of npm's."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from servers.processes import NotInstalledError, free_port, listens, needed, running

# Every Azurite knows this account; its key is published, and no secret.
_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_SCRIPT = Path("node_modules/azurite/dist/src/blob/main.js")


@dataclass(frozen=True)
class AzureServer:
    """Where Azurite listens, and how it is used."""

    connection_string: str

    @property
    def options(self) -> dict[str, Any]:
        """fsspec's options for ``abfs://`` URLs."""
        return {"connection_string": self.connection_string}

    def client(self) -> Any:
        """Azure's own client."""
        from azure.storage.blob import BlobServiceClient

        return BlobServiceClient.from_connection_string(self.connection_string)


def installed() -> Path:
    """Azurite's main script: of a global installation, or in the folder that CKPTGUARD_AZURITE names."""
    places = [Path(os.environ["CKPTGUARD_AZURITE"]) / _SCRIPT] if "CKPTGUARD_AZURITE" in os.environ else []
    program = shutil.which("azurite-blob")
    if program is not None:
        places.append(Path(program).resolve())
    for place in places:
        if place.is_file():
            return place
    message = "no azurite-blob here: python dev.py test installs Azurite where npm is"
    raise NotInstalledError(message, required=shutil.which("npm") is not None)


@contextlib.contextmanager
def azurite(folder: Path) -> Iterator[AzureServer]:
    """A running server whose blobs lie in `folder`."""
    script = installed()
    (node,) = needed("node", package="Azurite")
    port = free_port()
    command = [node, str(script), "--silent", "--location", str(folder / "blobs"), "--blobPort", str(port)]
    command += ["--blobHost", "127.0.0.1", "--skipApiVersionCheck", "--disableTelemetry"]
    with running(command, folder / "azurite.log", lambda: listens(port)):
        endpoint = f"http://127.0.0.1:{port}/{_ACCOUNT}"
        yield AzureServer(
            f"DefaultEndpointsProtocol=http;AccountName={_ACCOUNT};AccountKey={_KEY};BlobEndpoint={endpoint};"
        )
