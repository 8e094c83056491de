"""Storage options belong to the run that was opened with them: several users' keys stand side by side in one process,
and no text shows them."""

from __future__ import annotations

import copy
import gc
import json
import logging
import pickle
import secrets
import traceback
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import msgspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from servers.moto_server import moto_server
from servers.processes import NotInstalledError
from support.runs import QUICK, write_torch
from support.views import look

from ckptguard.errors import DeniedError, SettingsError, StorageError
from ckptguard.records.run import create_record, list_records, open_run, read_record
from ckptguard.replicas.replicate import open_replica, replicate
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.storage import open_storage, opening
from ckptguard.storage.opening import _one_of_its_kind, _same
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.settings import Settings, with_environment
from ckptguard.values.storage_options import StorageOptions

KEYS = ("one-users-secret", "another-users-secret")


class Vault(MemoryFileSystem):  # type: ignore[misc]
    """A store of which each key opens another part, and whose errors quote the key."""

    protocol = "vault"
    stores: ClassVar[dict[str, dict[str, Any]]] = {}
    opened: ClassVar[list[str]] = []

    def __init__(self, secret: str = "", **options: Any) -> None:
        super().__init__(**options)
        if secret not in KEYS:
            raise PermissionError(f"the vault knows no {secret!r}")
        self.store = self.stores.setdefault(secret, {})
        self.pseudo_dirs = [""]
        self.secret = secret
        self.opened.append(secret)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("vault://").strip("/")

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        if path.endswith("/broken"):
            raise RuntimeError(f"an odd text with {self.secret} in it")
        found: bytes = super().cat_file(path, start, end, **options)
        return found


@pytest.fixture(autouse=True)
def _vault(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(opening, "_shared", {})
    fsspec.register_implementation("vault", Vault, clobber=True)
    yield
    Vault.stores.clear()
    Vault.opened.clear()


def settings_of(key: str) -> Settings:
    """What one user gives."""
    return QUICK.changed(storage={"vault": {"secret": key}})


def write(url: str, settings: Settings, folder: Path, step: int) -> None:
    """A checkpoint of this step, there."""
    folder.mkdir(exist_ok=True)
    write_torch(folder, step, seed=step)
    (path,) = folder.iterdir()
    open_storage(url, must_exist=False, options=settings.storage).create(path.name, path.read_bytes())


def test_two_users_are_served_side_by_side(tmp_path: Path) -> None:
    """Two runs under one URL with two keys are two runs, used in turns; each sees what its own key opens, and nobody
    is served without a key."""
    users = [settings_of(key) for key in KEYS]
    for number, settings in enumerate(users):
        write("vault://runs/a", settings, tmp_path / str(number), 100 * (number + 1))
    runs = [open_run("vault://runs/a", settings) for settings in users]
    for _ in range(2):
        for run, settings in zip(runs, users, strict=True):
            reconcile(look(run, settings), PassNotes(), assume_quiet=True)
    assert [find_known_good(run).step for run in runs] == [100, 200]
    assert [len(list_records(run, "manifests", recursive=True)) for run in runs] == [1, 1]
    with pytest.raises(StorageError):
        open_run("vault://runs/a")
    with pytest.raises(DeniedError):
        open_run("vault://runs/a", settings_of("a-third-users-secret"))


def test_two_users_are_served_from_threads() -> None:
    """Many threads at once, each with the one or the other key, never see the other's objects."""

    def serve(number: int) -> tuple[str, set[bytes]]:
        key = KEYS[number % 2]
        run = open_run("vault://runs/b", settings_of(key), must_exist=False)
        create_record(run, f"pins/{number}", key.encode())
        return key, {read_record(run, f"pins/{name}") or b"" for name in list_records(run, "pins")}

    with ThreadPoolExecutor(8) as threads:
        for key, found in threads.map(serve, range(60)):
            assert found == {key.encode()}
    assert sorted(Vault.opened) == sorted(KEYS)  # one connection each, shared by all that give the same key


def test_places_beside_a_run_are_opened_with_its_options(tmp_path: Path) -> None:
    """Records elsewhere and replicas are reached with the key of the run that they belong to."""
    for number, key in enumerate(KEYS):
        settings = settings_of(key).changed(records="vault://records/c")
        root = tmp_path / f"run-{number}"
        root.mkdir()
        write_torch(root, 100 + number, seed=number)
        run = open_run(str(root), settings)
        reconcile(look(run, settings), PassNotes(), assume_quiet=True)
        done = replicate(look(run, settings), f"vault://replicas/{number}")
        assert (done.behind, done.trouble) == (0, None)
        replica = open_replica(look(run, settings), f"vault://replicas/{number}")
        assert find_known_good(replica.run).step == 100 + number
        assert any(name.startswith("/records/c") for name in Vault.stores[key])
        assert {name.split("/")[2] for name in Vault.stores[key] if name.startswith("/replicas")} == {str(number)}


def test_two_servers_of_one_protocol(tmp_path: Path) -> None:
    """Two S3 servers with a bucket of one name, told apart by the options alone."""
    places = [tmp_path / "one", tmp_path / "other"]
    for place in places:
        place.mkdir()
    try:
        with moto_server(places[0]) as one, moto_server(places[1]) as other:
            users = [StorageOptions({"s3": server.options}) for server in (one, other)]
            for server in (one, other):
                server.client().create_bucket(Bucket="tenants")
            opened = [open_storage("s3://tenants/run", must_exist=False, options=options) for options in users]
            for number in range(4):
                opened[number % 2].create(f"{number}", b"%d" % (number % 2))
            assert [[e.key for e in storage.list()] for storage in opened] == [["0", "2"], ["1", "3"]]
            again = [open_storage("s3://tenants/run", options=options) for options in users]
            assert [[e.key for e in storage.list()] for storage in again] == [["0", "2"], ["1", "3"]]
    except NotInstalledError as error:
        pytest.skip(str(error))


def test_no_text_shows_a_secret(caplog: pytest.LogCaptureFixture) -> None:
    """Representations, pickles, errors with their traces and causes, and what msgspec writes."""
    settings = settings_of(KEYS[0])
    run = open_run("vault://runs/d", settings, must_exist=False)
    run.storage.create("broken", b"1")
    with pytest.raises(StorageError) as caught:
        run.storage.open("broken").read(0, 1)
    assert "***" in caught.value.message
    ours = "".join(traceback.format_exception_only(caught.value)) + repr(caught.value.fields)
    logging.getLogger("ckptguard").warning("%s %r", settings, run)
    texts = [
        *(repr(each) for each in (settings, settings.storage, run, run.storage, run.storage.inner._root._connect)),
        *(str(pickle.dumps(settings, n)) for n in range(pickle.HIGHEST_PROTOCOL + 1)),
        *(ours, caplog.text, str(list(settings.__rich_repr__()) if hasattr(settings, "__rich_repr__") else "")),
        f"{msgspec.structs.asdict(settings)} {settings.storage.names}",
    ]
    assert not [text for text in texts if KEYS[0] in text]
    with pytest.raises(TypeError):
        msgspec.json.encode(settings)
    with pytest.raises(TypeError):
        json.dumps(settings.storage)


def test_pickled_options_are_never_replaced_by_somebody_elses() -> None:
    """Settings out of pickle are whole but for the options, and refuse to open what these were for."""
    settings = settings_of(KEYS[0])
    again = pickle.loads(pickle.dumps(settings))
    assert again.changed(storage=settings.storage) == settings
    assert again != settings
    for attempt in (
        lambda: open_run("vault://runs/e", again, must_exist=False),
        again.storage.revealed,
        lambda: with_environment(again, {"CKPTGUARD_SETTLE": "1"}).storage.revealed(),
    ):
        with pytest.raises(SettingsError, match="were removed when these settings were pickled"):
            attempt()
    assert open_storage(f"memory://free-{secrets.token_hex(4)}", must_exist=False, options=again.storage)
    assert pickle.loads(pickle.dumps(QUICK)) == QUICK
    handed = StorageOptions(settings.storage.revealed())  # the explicit way
    assert open_run("vault://runs/e", QUICK.changed(storage=handed), must_exist=False).url == "vault://runs/e"


def test_options_are_a_value() -> None:
    """They are copied in and out, equal by content, hashable, and cannot be changed."""
    table = {"vault": {"secret": KEYS[0], "further": {"list": [1]}}}
    options = StorageOptions(table)
    table["vault"]["further"]["list"].append(2)  # type: ignore[index, attr-defined]
    options.for_url("vault://x")["further"]["list"].append(3)
    options.revealed()["vault"].clear()
    assert options.for_url("vault://x/y") == {"secret": KEYS[0], "further": {"list": [1]}}
    assert options == StorageOptions(options) == copy.deepcopy(options) == copy.copy(options)
    assert {options, StorageOptions(options)} == {options}
    assert (bool(options), bool(StorageOptions())) == (True, False)
    with pytest.raises(AttributeError):
        options._by_name = {}
    for wrong in (5, {"s3": "x"}, "s3"):
        with pytest.raises(SettingsError):
            StorageOptions(wrong)  # type: ignore[arg-type]
    assert copy.deepcopy(settings_of(KEYS[0])) == settings_of(KEYS[0])


def test_a_connection_is_shared_for_equal_options_only() -> None:
    """Plain data is compared by its content, anything else is equal to itself alone: its text may hide a secret."""

    class Credential:
        def __repr__(self) -> str:
            return "Credential(***)"

    one, other = Credential(), Credential()
    assert _same({"a": [1, {"b": "2"}]}) == _same({"a": [1, {"b": "2"}]})
    assert _same({"a": 1}) != _same({"a": "1"}) != _same({"a": True})
    assert _same({"token": one}) == _same(StorageOptions({"gs": {"token": one}}).for_url("gs://x"))
    assert _same({"token": one}) != _same({"token": other})
    assert len({_same({"token": one}), _same({"token": one}), _same({"token": other})}) == 2
    _one_of_its_kind("memory://lasts", {"token": one}, object)
    lasts = weakref.ref(one)
    del one
    gc.collect()
    assert lasts() is not None  # no later object is taken for it
