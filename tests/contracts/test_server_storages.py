"""Storages behind real servers keep the contract of `Storage`, each as far as it says itself."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

import pytest
from servers.azurite import AzureServer
from servers.fake_gcs import GcsServer
from servers.fixtures import AZURE_CONTAINER, GCS_BUCKET, S3_BUCKETS, served, serving
from servers.moto_server import moto_server
from servers.processes import free_port
from servers.s3 import S3Server
from servers.sshd import SftpServer, sshd
from support.faulty_storage import FakeClock

from ckptguard.errors import DeniedError, NotFoundError, ObjectMissingError, TransientError
from ckptguard.storage import Storage, open_storage
from ckptguard.storage.redaction import secrets_in
from ckptguard.storage.retries import RetryingStorage
from ckptguard.storage.sftp.sftp_storage import SftpStorage
from ckptguard.testing import StorageContract
from ckptguard.values.storage_options import StorageOptions

# aiohttp would like large bodies as streams, and gcsfs and adlfs hand over bytes.
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")


class Served(StorageContract):
    """A storage on a server that wants a key."""

    def secrets(self) -> frozenset[str]:
        return secrets_in(served().storage.revealed())

    def opened_again(self, storage: Storage) -> Storage:
        return open_storage(storage.url, must_exist=True, options=served().storage)


class ServerContract(Served):
    """A storage under a fresh prefix of a bucket."""

    bucket: ClassVar[str]
    scheme: ClassVar[str]

    @pytest.fixture
    def storage(self, server: Any) -> Storage:
        self.server = server
        return open_storage(
            f"{self.scheme}://{self.bucket}/test-{secrets.token_hex(8)}/root",
            must_exist=False,
            options=served().storage,
        )

    @pytest.fixture(autouse=True)
    def _server(self, server: Any) -> None:
        self.server = server

    def absent(self) -> Storage:
        place = f"{self.scheme}://{self.bucket}/absent-{secrets.token_hex(8)}/below"
        return open_storage(place, must_exist=False, options=served().storage)

    def key_of(self, storage: Storage, key: str) -> str:
        """The whole key in the bucket."""
        return storage.url.removeprefix(f"{self.scheme}://{self.bucket}/") + "/" + key

    def put_many(self, storage: Storage, keys: list[str]) -> None:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda key: self.put_raw(storage, key, b"1"), keys))


class S3Contract(ServerContract):
    """Any S3 server."""

    scheme = "s3"
    many = 130  # these servers are told to answer with 100
    clients: ClassVar[dict[str, Any]] = {}

    @property
    def client(self) -> Any:
        """boto's client, one for all tests."""
        return self.clients.setdefault(self.server.endpoint, self.server.client())

    def put_raw(self, storage: Storage, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=self.key_of(storage, key), Body=data)

    def get_raw(self, storage: Storage, key: str) -> bytes:
        return self.client.get_object(Bucket=self.bucket, Key=self.key_of(storage, key))["Body"].read()

    def test_nothing_unfinished_stays_behind(self, storage: Storage) -> None:
        """An abandoned upload frees its parts."""
        with storage.upload("k") as upload:
            upload.write(bytes(20 << 20))
        unfinished = self.client.list_multipart_uploads(Bucket=self.bucket).get("Uploads", [])
        assert [u for u in unfinished if u["Key"] == self.key_of(storage, "k")] == []


class TestMoto(S3Contract):
    """moto's server."""

    bucket = S3_BUCKETS[0]

    @pytest.fixture
    def server(self, moto: S3Server) -> S3Server:
        return moto


class TestRadosgw(S3Contract):
    """Ceph's gateway."""

    bucket = S3_BUCKETS[1]

    @pytest.fixture
    def server(self, ceph: S3Server) -> S3Server:
        return ceph


class TestAzurite(ServerContract):
    """Azure's blobs."""

    bucket, scheme = AZURE_CONTAINER, "abfs"
    many = 300  # one answer holds 5000, which take minutes to write

    @pytest.fixture
    def server(self, azure: AzureServer) -> AzureServer:
        return azure

    @pytest.fixture(autouse=True)
    def _client(self, azure: AzureServer) -> Iterator[None]:
        with azure.client() as service:
            self.container = service.get_container_client(self.bucket)
            yield

    def put_raw(self, storage: Storage, key: str, data: bytes) -> None:
        self.container.upload_blob(self.key_of(storage, key), data, overwrite=True)

    def get_raw(self, storage: Storage, key: str) -> bytes:
        return self.container.download_blob(self.key_of(storage, key)).readall()


class TestGcs(ServerContract):
    """Google's objects."""

    bucket, scheme = GCS_BUCKET, "gs"

    @pytest.fixture
    def server(self, gcs: GcsServer) -> GcsServer:
        return gcs

    def put_raw(self, storage: Storage, key: str, data: bytes) -> None:
        name = quote(self.key_of(storage, key), safe="")
        self.server.call("POST", f"/upload/storage/v1/b/{self.bucket}/o?uploadType=media&name={name}", data)

    def get_raw(self, storage: Storage, key: str) -> bytes:
        name = quote(self.key_of(storage, key), safe="")
        return self.server.call("GET", f"/storage/v1/b/{self.bucket}/o/{name}?alt=media")


class TestSftp(Served):
    """OpenSSH's SFTP server."""

    @pytest.fixture(autouse=True)
    def _server(self, sftp: SftpServer) -> None:
        self.server = sftp

    @pytest.fixture
    def storage(self, sftp: SftpServer) -> Storage:
        folder = sftp.folder / f"test-{secrets.token_hex(8)}"
        folder.mkdir()
        return open_storage(sftp.url(folder), options=served().storage)

    def absent(self) -> Storage:
        place = self.server.url(self.server.folder / f"absent-{secrets.token_hex(8)}")
        return open_storage(place, must_exist=False, options=served().storage)

    def put_raw(self, storage: Storage, key: str, data: bytes) -> None:
        path = self._local(storage, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def get_raw(self, storage: Storage, key: str) -> bytes:
        return self._local(storage, key).read_bytes()

    def _local(self, storage: Storage, key: str) -> Path:
        return Path("/" + storage.url.split("/", 3)[3], key)

    def test_links_are_entries_and_never_ways(self, storage: Storage, tmp_path: Path) -> None:
        """A link is listed with its target; nothing reads, writes or removes through it."""
        root = self._local(storage, "")
        (tmp_path / "secret").write_bytes(b"secret")
        (root / "folder").symlink_to(tmp_path)
        (root / "file").symlink_to(tmp_path / "secret")
        assert [(e.key, e.kind) for e in storage.list(recursive=True)] == [("file", "link"), ("folder", "link")]
        for attempt in (
            lambda: storage.open("file"),
            lambda: storage.open("folder/secret"),
            lambda: storage.list("folder"),
            lambda: storage.stat("folder/secret"),
            lambda: storage.create("folder/new", b"1"),
            lambda: storage.remove("folder/secret"),
            lambda: storage.copy("file", "copy"),
        ):
            with pytest.raises(DeniedError):
                attempt()
        storage.remove("folder")
        storage.remove("file")
        assert [p.name for p in tmp_path.iterdir()] == ["secret"]


def test_wrong_credentials_are_a_denial(moto: S3Server, ceph: S3Server) -> None:
    """A key that the server does not know, or a wrong secret: denied at once, and neither is told."""
    for number, (key, secret) in enumerate([("NOBODYATALL000000001", "no-secret-at-all"), (ceph.key, "wrong-secret")]):
        url = f"s3://ckptguard-denied-{number}"
        serving(url, {**ceph.options, "key": key, "secret": secret})
        storage = open_storage(f"{url}/run", must_exist=False, options=served().storage)
        for attempt in (
            lambda s=storage: s.list(),
            lambda s=storage: s.create("k", b"1"),
            lambda s=storage: s.stat("k"),
        ):
            with pytest.raises(DeniedError) as caught:
                attempt()
            assert not any(hidden in f"{caught.value} {caught.value.hint}" for hidden in (secret, ceph.secret))


def test_no_bucket_is_no_folder(moto: S3Server, ceph: S3Server) -> None:
    """A bucket that is not there is missing, in reading and in writing."""
    for number, server in enumerate((moto, ceph)):
        place = f"s3://ckptguard-nowhere-{number}/run"
        serving(place, server.options)
        with pytest.raises(NotFoundError):
            open_storage(place, options=served().storage)
        with pytest.raises(ObjectMissingError):
            open_storage(place, must_exist=False, options=served().storage).create("k", b"1")


_ONE_TRY = {"s3": {"addressing_style": "path"}, "retries": {"total_max_attempts": 1}}


def test_a_server_that_is_gone_may_come_back(tmp_path: Path) -> None:
    """No answer is a failure that may pass; once the server is back, the same storage works."""
    port = free_port()
    options = {"endpoint_url": f"http://127.0.0.1:{port}", "key": "k", "secret": "s", "config_kwargs": _ONE_TRY}
    retries = FakeClock().retries(attempts=2)
    told = StorageOptions({"s3://ckptguard-gone": options})
    storage = open_storage("s3://ckptguard-gone/run", must_exist=False, retries=retries, options=told)
    with pytest.raises(TransientError, match="tried 2 times"):
        storage.stat("k")
    with moto_server(tmp_path, port=port) as server:
        server.client().create_bucket(Bucket="ckptguard-gone")
        storage.create("k", b"1")
        assert storage.stat("k").size == 1


def test_an_unknown_host_is_not_trusted(sftp: SftpServer, tmp_path: Path) -> None:
    """A host whose key is not among the known ones is refused, with a hint; a wrong user key is a denial."""
    (tmp_path / "empty").write_text("")
    for options in ({"known_hosts": str(tmp_path / "empty")}, {"client_keys": [], "agent_path": None}):
        place = f"{sftp.url(sftp.folder)}/unknown-{len(options)}"
        serving(place, {**sftp.options, **options})
        with pytest.raises(DeniedError) as caught:
            open_storage(place, must_exist=False, options=served().storage).stat("k")
        assert caught.value.hint


def test_a_folder_on_sftp_may_be_named_like_a_part_of_a_url(sftp: SftpServer) -> None:
    """What looks like a query or a fragment is a name there."""
    storage = open_storage(f"{sftp.url(sftp.folder)}/run #1?x=2", must_exist=False, options=served().storage)
    storage.create("k", b"1")
    assert (sftp.folder / "run #1?x=2" / "k").read_bytes() == b"1"


def test_sftp_survives_a_lost_connection(tmp_path: Path) -> None:
    """When the server restarts, the storage and an open reader go on over a new connection."""
    with sshd(tmp_path) as first:
        serving(f"sftp://127.0.0.1:{first.port}", first.options)
        storage = open_storage(first.url(first.folder), options=served().storage)
        storage.create("k", b"12345678")
        reader = storage.open("k")
        assert reader.read(0, 4) == b"1234"
        drop_connections(storage)
        assert reader.read(4, 4) == b"5678"
        storage.create("l", b"1")
        assert [e.key for e in storage.list()] == ["k", "l"]


def drop_connections(storage: Storage) -> None:
    """Cut the SSH connection under a storage, as a network does."""
    assert isinstance(storage, RetryingStorage)
    assert isinstance(storage.inner, SftpStorage)
    file_system = storage.inner._session._file_system
    file_system.loop.call_soon_threadsafe(file_system._client._transport.abort)
