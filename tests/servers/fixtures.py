"""The servers as fixtures of a whole test session, each started by the first test that wants it.

Where a server is not installed its tests are skipped, but in CI (where CI is set) they must run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NoReturn, TypeVar

import pytest
from servers.azurite import AzureServer, azurite
from servers.fake_gcs import GcsServer, fake_gcs
from servers.moto_server import moto_server
from servers.processes import NotInstalledError
from servers.prometheus import promtool as find_promtool
from servers.radosgw import radosgw
from servers.s3 import S3Server
from servers.slurm import Slurm
from servers.slurm import slurm as slurm_cluster
from servers.sshd import SftpServer, sshd

from ckptguard.values.settings import Settings

T = TypeVar("T")
S3_BUCKETS = ("ckptguard-moto", "ckptguard-radosgw")
AZURE_CONTAINER = "ckptguard-azurite"
GCS_BUCKET = "ckptguard-gcs"


_SERVED: dict[str, dict[str, object]] = {}


def serving(url: str, options: dict[str, object]) -> None:
    """From now on, `served` settings open what begins with `url` with these options."""
    _SERVED[url] = options


def served(settings: Settings | None = None) -> Settings:
    """These settings with the options of every server that was started."""
    return (settings or Settings()).changed(storage=_SERVED)


def _started(start: Callable[[Path], AbstractContextManager[T]], folder: Path) -> Iterator[T]:
    try:
        running = start(folder)
        server = running.__enter__()
    except NotInstalledError as error:
        skip_or_fail(error)
    try:
        yield server
    finally:
        running.__exit__(None, None, None)


def skip_or_fail(error: NotInstalledError) -> NoReturn:
    """Skip the test of a program that is not here; in CI it must be."""
    if os.environ.get("CI") and error.required:
        pytest.fail(str(error))
    pytest.skip(str(error))


@pytest.fixture(scope="session")
def promtool() -> str:
    """The path of promtool, beside which Prometheus is."""
    try:
        return find_promtool()
    except NotInstalledError as error:
        skip_or_fail(error)


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """moto's S3 with the bucket ``ckptguard-moto``."""
    for server in _started(moto_server, tmp_path_factory.mktemp("moto")):
        yield _with_bucket(server, S3_BUCKETS[0])


@pytest.fixture(scope="session")
def ceph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Ceph's S3 gateway with the bucket ``ckptguard-radosgw``."""
    for server in _started(radosgw, tmp_path_factory.mktemp("ceph")):
        yield _with_bucket(server, S3_BUCKETS[1])


@pytest.fixture(scope="session")
def sftp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SftpServer]:
    """OpenSSH's SFTP server."""
    for server in _started(sshd, tmp_path_factory.mktemp("sshd")):
        serving(f"sftp://127.0.0.1:{server.port}", server.options)
        yield server


@pytest.fixture(scope="session")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzureServer]:
    """Azurite with the container ``ckptguard-azurite``."""
    for server in _started(azurite, tmp_path_factory.mktemp("azurite")):
        server.client().create_container(AZURE_CONTAINER)
        serving(f"abfs://{AZURE_CONTAINER}", server.options)
        yield server


@pytest.fixture(scope="session")
def gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GcsServer]:
    """fake-gcs-server with the bucket ``ckptguard-gcs``."""
    for server in _started(fake_gcs, tmp_path_factory.mktemp("gcs")):
        server.call("POST", "/storage/v1/b?project=test", b'{"name": "%s"}' % GCS_BUCKET.encode())
        serving(f"gs://{GCS_BUCKET}", server.options)
        yield server


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Slurm with one node."""
    yield from _started(slurm_cluster, tmp_path_factory.mktemp("slurm"))


def _with_bucket(server: S3Server, bucket: str) -> S3Server:
    server.client().create_bucket(Bucket=bucket)
    serving(f"s3://{bucket}", server.options)
    return server
