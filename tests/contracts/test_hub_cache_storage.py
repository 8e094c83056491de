"""A hub cache keeps the contract of `Storage`, shows snapshots' links as files, and follows no other link."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.faults import flip
from support.hub_caches import COMMIT, Hub, sharded_files

from ckptguard.errors import ChangedWhileReadError, DeniedError, ObjectMissingError
from ckptguard.storage import Storage
from ckptguard.storage.hub_blobs import HubCacheStorage, blob_of
from ckptguard.testing import StorageContract

SNAPSHOT = f"models--org--tiny/snapshots/{COMMIT}"
SHARD = f"{SNAPSHOT}/model-00001-of-00003.safetensors"


class TestHubCacheStorage(StorageContract):
    """A hub folder, in which everything but snapshots is an ordinary folder."""

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        (tmp_path / "root").mkdir()
        return HubCacheStorage(str(tmp_path / "root"))

    def absent(self) -> Storage:
        return HubCacheStorage(str(self.tmp_path / "absent" / "below"))

    def put_raw(self, storage: Storage, key: str, data: bytes) -> None:
        path = Path(storage.url, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def get_raw(self, storage: Storage, key: str) -> bytes:
        return Path(storage.url, key).read_bytes()


@pytest.fixture
def hub(tmp_path: Path) -> Hub:
    """A hub with one finished download, and a file outside that nobody may open."""
    hub = Hub(tmp_path / "hub")
    hub.download(sharded_files())
    (tmp_path / "canary").write_bytes(b"secret")
    return hub


@pytest.fixture
def opened() -> Iterator[list[str]]:
    """The last parts of all paths that this process opens meanwhile."""
    names: list[str] = []
    watching = [True]

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if watching and event == "open" and isinstance(arguments[0], str):
            names.append(os.path.basename(arguments[0]))

    sys.addaudithook(watch)
    yield names
    watching.clear()


def test_a_link_to_a_blob_is_a_file_under_its_own_name(hub: Hub) -> None:
    """Listed, described, opened and copied as the blob; the link's text is still told."""
    storage = HubCacheStorage(str(hub.folder))
    [entry] = [e for e in storage.list("", recursive=True) if e.key == SHARD]
    data = (hub.folder / SHARD).read_bytes()
    assert (entry.kind, entry.size, entry.target) == ("file", len(data), os.readlink(hub.folder / SHARD))
    assert storage.stat(SHARD) == entry
    with storage.open(SHARD) as reader:
        assert reader.entry == entry
        assert reader.read(0, len(data)) == data
        reader.check_unchanged()
    assert storage.copy(SHARD, "copy", how="link") in ("copy", "reflink")
    assert (hub.folder / "copy").read_bytes() == data
    assert not (hub.folder / "copy").is_symlink()
    assert storage.root is None


def test_a_blob_that_repositories_share_is_read_where_it_lies(hub: Hub) -> None:
    """huggingface_hub 2 keeps bytes once for all repositories; only in a store that it marked."""
    hub.share(hub.folder / SHARD)
    storage = HubCacheStorage(str(hub.folder))
    data = (hub.folder / SHARD).read_bytes()
    with storage.open(SHARD) as reader:
        assert reader.read(0, len(data)) == data
        reader.check_unchanged()
    (hub.folder / "blobs" / ".huggingface-shared-blobs").unlink()
    assert storage.stat(SHARD).kind == "link"
    with pytest.raises(DeniedError):
        storage.open(SHARD)


@pytest.mark.parametrize(
    "target",
    [
        "/etc/hostname",
        "../../../../canary",
        "../../blobs/../../../canary",
        "../../blobs/../refs/main",
        "../../../models--org--tiny/blobs/x",
        "../../blobs/",
        "../../blobs",
        "../../../blobs/x",
        "config.json",
        "../../blobs/a\nb",
        "../../blobs/.hidden",
        "model-00001-of-00003.safetensors",
    ],
)
def test_links_to_anywhere_else_stay_links(hub: Hub, opened: list[str], target: str) -> None:
    """Outside, absolute, beside, to itself: it is an entry of kind "link", never opened, and the reason is told."""
    link = hub.folder / SHARD
    link.unlink()
    link.symlink_to(target)
    opened.clear()
    storage = HubCacheStorage(str(hub.folder))
    entry = storage.stat(SHARD)
    assert entry.kind == "link"
    assert storage.why_unread(entry) == "a link that does not lead to a blob of its own repository"
    with pytest.raises(DeniedError):
        storage.open(SHARD)
    assert "canary" not in opened
    assert "hostname" not in opened


@pytest.mark.parametrize("kind", ["fifo", "folder", "link", "loop", "absolute"])
def test_blobs_that_are_no_files_are_not_opened(hub: Hub, opened: list[str], kind: str) -> None:
    """A FIFO, a folder, a link out of the cache or to itself instead of a blob."""
    blob = (hub.folder / SHARD).resolve()
    blob.unlink()
    outside = hub.folder.parent / "canary"
    {
        "fifo": lambda: os.mkfifo(blob),
        "folder": blob.mkdir,
        "link": lambda: blob.symlink_to("../../../canary"),
        "loop": lambda: blob.symlink_to(blob.name),
        "absolute": lambda: blob.symlink_to(outside),
    }[kind]()
    opened.clear()
    storage = HubCacheStorage(str(hub.folder))
    assert storage.stat(SHARD).kind == "link"
    assert storage.why_unread(storage.stat(SHARD))
    with pytest.raises(DeniedError):
        storage.open(SHARD)
    assert "canary" not in opened


def test_a_folder_of_blobs_that_is_a_link_leads_nowhere(hub: Hub, tmp_path: Path) -> None:
    """Also when all names below it are right."""
    (hub.repository() / "blobs").rename(tmp_path / "elsewhere")
    (hub.repository() / "blobs").symlink_to(tmp_path / "elsewhere")
    storage = HubCacheStorage(str(hub.folder))
    assert storage.why_unread(storage.stat(SHARD)) == "a link into a folder of blobs that is itself a link"
    with pytest.raises(DeniedError):
        storage.open(SHARD)


def test_a_missing_blob_is_told_apart(hub: Hub) -> None:
    """A link whose blob is not there stays a link, without a reason against it."""
    (hub.folder / SHARD).resolve().unlink()
    storage = HubCacheStorage(str(hub.folder))
    assert storage.stat(SHARD).kind == "link"
    assert storage.why_unread(storage.stat(SHARD)) is None
    with pytest.raises(ObjectMissingError):
        storage.open(SHARD)


def test_changes_under_a_reader_are_noticed(hub: Hub) -> None:
    """Another blob under the link, and other bytes in the blob."""
    storage = HubCacheStorage(str(hub.folder))
    link = hub.folder / SHARD
    with storage.open(SHARD) as reader:
        other = os.readlink(link.with_name("model-00002-of-00003.safetensors"))
        first = os.readlink(link)
        link.unlink()
        link.symlink_to(other)
        with pytest.raises(ChangedWhileReadError) as caught:
            reader.check_unchanged()
        assert caught.value.key == SHARD
        link.unlink()
        link.symlink_to(first)
        reader.check_unchanged()
        os.truncate(link, 10)
        with pytest.raises(ChangedWhileReadError):
            reader.check_unchanged()
    flip(link.resolve())


def test_blob_keys() -> None:
    """Only the exact way from the link's own folder counts, however deep it lies."""
    assert blob_of(f"{SNAPSHOT}/a", "../../blobs/x") == "models--org--tiny/blobs/x"
    assert blob_of(f"{SNAPSHOT}/unet/deep/a", "../../../../blobs/x") == "models--org--tiny/blobs/x"
    for key, target in (
        (f"{SNAPSHOT}/unet/a", "../../blobs/x"),
        (f"{SNAPSHOT}/a", "../../../blobs/x"),
        (SNAPSHOT, "../blobs/x"),
        ("other/snapshots/c/a", "../../blobs/x"),
        (f"{SNAPSHOT}/a", None),
    ):
        assert blob_of(key, target) is None
