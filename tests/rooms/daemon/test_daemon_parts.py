"""Settings, socket, watcher and log of the daemon, each on its own."""

from __future__ import annotations

import json
import logging
import os
import socket
import stat
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ckptguard_daemon import log as log_module
from ckptguard_daemon.http.unix_socket import LONGEST_PATH, listen
from ckptguard_daemon.log import log, start_logging
from ckptguard_daemon.plan import distinct_urls

from ckptguard.engine.watched_run import storage_of
from ckptguard.errors import BusyError, SettingsError
from ckptguard.storage.local import mounts
from ckptguard.values.settings import Settings

DEPLOY = Path(__file__).parents[3] / "daemon" / "ckptguard_daemon" / "deploy"


def test_the_example_shows_every_setting_with_its_default() -> None:
    """deploy/ckptguard.toml is valid, its values are the defaults, and no setting is left out."""
    text = (DEPLOY / "ckptguard.toml").read_text()
    shown = tomllib.loads(text)
    defaults = msgspec.to_builtins(Settings(), enc_hook=repr)
    assert shown == {name: list(v) if isinstance(v := defaults[name], tuple) else v for name in shown}
    assert [name for name in defaults if f"{name} =" not in text] == []


def test_runs_are_named_once(tmp_path: Path) -> None:
    """Two spellings of one run are one; several runs cannot share one place for records."""
    assert distinct_urls([f"{tmp_path}/a", f"{tmp_path}/a/"], Settings()) == (f"{tmp_path}/a",)
    with pytest.raises(SettingsError):
        distinct_urls(["a", "b"], Settings(records="/r"))


def test_the_socket_is_private_from_the_first_moment(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also before it listens, with a umask that forbids nothing, and where its folder is one that others can enter."""
    modes: list[int] = []

    class Seen(socket.socket):
        def bind(self, address: Any) -> None:
            super().bind(address)
            modes.append(stat.S_IMODE(os.lstat(address).st_mode))

    monkeypatch.setattr(socket, "socket", Seen)
    before = os.umask(0)
    try:
        listen(str(short_folder / "s"), [], {}).close()
        assert os.umask(0) == 0  # it is as it was
    finally:
        os.umask(before)
    assert modes == [0o600]


@pytest.mark.parametrize("theirs", ["open", "link", "file", "foreign"])
def test_who_made_the_runtime_folder_first_keeps_nobody_from_listening(short_folder: Path, theirs: str) -> None:
    """One that others can enter, that leads elsewhere or is another user's is not used: a new one of mode 0700 is,
    which goes with the socket."""
    folder = short_folder / "ckptguard"
    if theirs == "link":
        (short_folder / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to("elsewhere")
    elif theirs == "file":
        folder.write_text("")
    else:
        folder.mkdir(mode=0o700)
        folder.chmod(0o755 if theirs == "open" else 0o700)
    if theirs == "foreign":
        if os.geteuid() != 0:
            pytest.skip("only root can give a folder to another user")
        os.chown(folder, 12345, 12345)
    place = listen(None, ["/a"], {"XDG_RUNTIME_DIR": str(short_folder)})
    own = Path(place.path).parent
    found = own.lstat()
    assert (stat.S_IMODE(found.st_mode), found.st_uid, own == folder) == (0o700, os.getuid(), False)
    assert not list(folder.iterdir()) if folder.is_dir() else True
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(place.path)
    place.close()
    assert not own.exists()


def test_sockets_are_not_placed_where_others_write(short_folder: Path) -> None:
    """A folder that others may write to, a path that is too long, and a file in the way are refused."""
    (short_folder / "open").mkdir()
    (short_folder / "open").chmod(0o777)
    (short_folder / "file").write_text("mine")
    for path in (short_folder / "open" / "s", short_folder / ("x" * LONGEST_PATH), short_folder / "file"):
        with pytest.raises(SettingsError):
            listen(str(path), (), {})
    assert (short_folder / "file").read_text() == "mine"


def test_only_dead_sockets_are_replaced(short_folder: Path) -> None:
    """A path at which somebody answers is busy; one that nobody serves is taken over, and left clean."""
    path = str(short_folder / "s")
    first = listen(path, (), {})
    with pytest.raises(BusyError):
        listen(path, (), {})
    first.socket.close()  # as after kill -9: the path stays
    second = listen(path, (), {})
    first.close()
    assert os.path.exists(path)  # it is the second's now
    second.close()
    assert not os.path.exists(path)


def test_log_lines_are_json_whatever_they_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control characters, surrogates, exceptions and libraries' words all make one line of JSON each."""
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(log_module.logging, "captureWarnings", lambda _: None)
    level = root.level
    start_logging(str(tmp_path / "log"))
    try:
        log("one", text="a\nb\x1b[0m\udcff", inner={"k\n": ["\u202e"]}, path=Path("/x"))
        logging.getLogger("library").warning("said %s", "this\n")
        try:
            raise ValueError("x")
        except ValueError:
            log("two", level="error", trace=True)
    finally:
        for handler in root.handlers:
            handler.close()
        root.setLevel(level)
    one, library, two = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert (one["text"], one["inner"]) == ("a\\u000ab\\u001b[0m\\udcff", {"k\\u000a": ["\\u202e"]})
    assert (library["logger"], library["message"]) == ("library", "said this\\u000a")
    assert (two["level"], "ValueError" in two["traceback"]) == ("error", True)


@pytest.mark.parametrize(
    ("url", "storage"),
    [("s3://bucket/a/b", "s3://bucket"), ("s3://[bad/x", "s3://[bad"), ("memory://", "memory://")],
)
def test_any_place_has_a_storage(url: str, storage: str) -> None:
    """Also one with a mistake in it, which only the opening tells."""
    assert storage_of(url) == storage


def test_local_places_are_told_apart_by_their_mounts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anybody asks the disks, because one of them may hang."""
    monkeypatch.setattr(mounts, "mounts", lambda: [("/", "ext4"), ("/nfs", "nfs4"), ("/nfs/other", "nfs4")])
    places = ["/data/run", "/nfs/run", "/nfs/other/run", "/nfsrun"]
    assert [storage_of(place) for place in places] == ["mount /", "mount /nfs", "mount /nfs/other", "mount /"]
