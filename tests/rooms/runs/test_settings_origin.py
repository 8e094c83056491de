"""A settings file that another user may have written gives only settings that do no harm."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.runs import write_safetensors, write_torch

from ckptguard.errors import SettingsError
from ckptguard.fleet import find_runs, read_fleet
from ckptguard.runs import settings_origin
from ckptguard.runs.settings_file import load_settings, training_settings
from ckptguard.values.settings import HARMLESS, Settings, with_table

STRANGER = 12345
# Every setting with a value that is not the default, and whether it counts in a file of somebody else.
VALUES: dict[str, tuple[Any, bool]] = {
    "settle": (7.0, True),
    "scan_interval": (8.0, True),
    "unfinished_limit": (9.0, True),
    "hints": ("https://sqs.elsewhere.example/1/q", False),
    "keep_good": (3, True),
    "keep_pending": (3, True),
    "keep": ("link", True),
    "copy_limit": (5, True),
    "copy_every": (5.0, True),
    "on_full": ("wait", True),
    "records": ("/elsewhere", False),
    "records_format": (1, False),
    "allow_nonfinite": (["mask"], False),
    "trust_globals": (["os.system"], False),
    "patterns": ([{"path": "w*.bin"}], False),
    "saves": ([{"together": ["G_*.pth", "D_*.pth"]}], False),
    "pointers": (["resume_from"], False),
    "checks": (["weight-rule"], False),  # it chooses whose code runs
    "layouts": (["nightly"], False),
    "no_plugins": (True, False),  # a check that the user asked for would be missing
    "team": ("red", False),  # a token may be for the runs of a label
    "project": ("apollo", False),
    "owner": ("eve", False),
    "on_incident": (["touch", "/tmp/x"], False),
    "webhook": ("http://elsewhere.example/", False),
    "notify": (["json://elsewhere.example/"], False),
    "digest": ("md5", True),
    "workers": (2, True),
    "worker_memory": (2**40, False),
    "worker_seconds": (1e8, False),
    "verify_rate": (1e6, True),
    "scrub_every": (60.0, True),
    "scrub_rate": (1e6, True),
    "repair": (True, False),
    "keep_last": (1, False),
    "keep_every": (1000, False),
    "thin_after": (1, False),
    "keep_bytes": ("2TB", False),
    "keep_within": (1.0, False),
    "keep_best": (["loss:min"], False),
    "prune_failed": (True, False),
    "trash_grace": (0.0, False),
    "replicas": (["s3://elsewhere/{run}"], False),
    "replica_thin": (True, False),
    "replica_rate": (1e6, True),
    "storage": ({"s3": {"endpoint_url": "http://elsewhere.example"}}, False),
}


def toml(**values: Any) -> str:
    """A settings file that sets these."""

    def text(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{json.dumps(name)} = {text(inner)}" for name, inner in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ", ".join(map(text, value)) + "]"
        return json.dumps(value)

    return "".join(f"{name} = {text(value)}\n" for name, value in values.items())


class Place(NamedTuple):
    """A current folder with a settings file in it, and what the command is about. `made` are the folders on the way,
    the outermost first."""

    made: tuple[Path, ...]
    run: Path

    @property
    def here(self) -> Path:
        """The current folder."""
        return self.made[-1]

    @property
    def file(self) -> Path:
        """The settings file."""
        return self.here / "ckptguard.toml"


def make_place(root: Path, patched: pytest.MonkeyPatch) -> Place:
    """All of it is this user's, and nobody else can change it. The run is a folder in the current one."""
    made = (root / "a", root / "a" / "b", root / "a" / "b" / "c")
    for folder in made:
        folder.mkdir(mode=0o755, parents=True)
    (made[-1] / "run").mkdir()
    patched.chdir(made[-1])
    return Place(made, made[-1] / "run")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """The current folder of a test."""
    return make_place(tmp_path, monkeypatch)


Way = Callable[[Place, pytest.MonkeyPatch], list[str]]
WAYS: dict[str, Way] = {}
OWN: dict[str, Way] = {}


def way(table: dict[str, Way]) -> Callable[[Way], Way]:
    """Put a way into a table by its name. It arranges things and returns the targets."""

    def note(arrange: Way) -> Way:
        table[arrange.__name__] = arrange
        return arrange

    return note


def _mode(mode: int, *, group: int | None = None) -> Way:
    def arrange(place: Place, patched: pytest.MonkeyPatch) -> list[str]:
        if group is not None:
            _as_root(lambda: os.chown(place.file, -1, group))
        place.file.chmod(mode)
        return [str(place.run)]

    return arrange


def _folder(level: int, change: Callable[[Path], None]) -> Way:
    def arrange(place: Place, patched: pytest.MonkeyPatch) -> list[str]:
        change(place.made[level])
        return [str(place.run)]

    return arrange


def _as_root(work: Callable[[], None]) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    work()


WAYS |= {f"mode_{mode:o}": _mode(mode) for mode in (0o646, 0o606, 0o666, 0o602, 0o777)}
WAYS |= {f"mode_{mode:o}_of_a_group": _mode(mode, group=STRANGER) for mode in (0o664, 0o620, 0o660)}
for number in range(3):
    WAYS[f"folder_{number}_open_to_all"] = _folder(number, lambda folder: folder.chmod(0o777))
    WAYS[f"folder_{number}_open_to_a_group"] = _folder(
        number, lambda folder: _as_root(lambda: (os.chown(folder, -1, STRANGER), folder.chmod(0o775))[0])
    )
    WAYS[f"folder_{number}_of_a_stranger"] = _folder(
        number, lambda folder: _as_root(lambda: os.chown(folder, STRANGER, -1))
    )
    OWN[f"folder_{number}_sticky"] = _folder(number, lambda folder: folder.chmod(0o1777))


@way(WAYS)
def of_a_stranger(place: Place, patched: pytest.MonkeyPatch) -> list[str]:
    """Another user's file."""
    _as_root(lambda: os.chown(place.file, STRANGER, -1))
    return [str(place.run)]


@way(WAYS)
def of_a_stranger_in_a_sticky_folder(place: Place, patched: pytest.MonkeyPatch) -> list[str]:
    """As in /tmp."""
    _as_root(lambda: os.chown(place.file, STRANGER, -1))
    place.here.chmod(0o1777)
    return []


def _linked(place: Place, to: Path) -> None:
    text = place.file.read_text()
    place.file.unlink()
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(text)
    place.file.symlink_to(os.path.relpath(to, place.here))


@way(WAYS)
def link_of_a_stranger(place: Place, patched: pytest.MonkeyPatch) -> list[str]:
    """A stranger's link to a file of this user."""
    _linked(place, place.made[0] / "mine.toml")
    _as_root(lambda: os.lchown(place.file, STRANGER, -1))
    return [str(place.run)]


@way(WAYS)
def link_into_an_open_folder(place: Place, patched: pytest.MonkeyPatch) -> list[str]:
    """This user's link to a file that others can replace."""
    _linked(place, place.made[0] / "open" / "mine.toml")
    (place.made[0] / "open").chmod(0o777)
    return [str(place.run)]


@way(WAYS)
def link_through_a_strangers_link(place: Place, patched: pytest.MonkeyPatch) -> list[str]:
    """A link of this user whose way leads over a stranger's."""
    _linked(place, place.made[0] / "real" / "mine.toml")
    (place.made[0] / "way").symlink_to("real")
    _as_root(lambda: os.lchown(place.made[0] / "way", STRANGER, -1))
    place.file.unlink()
    place.file.symlink_to(place.made[0] / "way" / "mine.toml")
    return [str(place.run)]


def _targets(*named: str, link: bool = False) -> Way:
    """A command about these, in which ``HERE`` is the current folder and ``ABOVE`` the outermost one. `link`: another
    name of the current folder is in the outermost one."""

    def arrange(place: Place, patched: pytest.MonkeyPatch) -> list[str]:
        if link:
            (place.made[0] / "other").symlink_to(place.here)
        return [target.replace("HERE", str(place.here)).replace("ABOVE", str(place.made[0])) for target in named]

    return arrange


WAYS |= {
    "the_target_is_here": _targets("."),
    "one_of_the_targets_is_here": _targets("s3://bucket/run", "/no/such/run", "HERE"),
    "the_target_is_above": _targets("ABOVE"),
    "the_target_is_a_link_to_here": _targets("ABOVE/other", link=True),
    "the_target_is_a_url_of_here": _targets("file://HERE"),
    "the_target_is_a_chain_to_here": _targets("simplecache::file://HERE"),
    "the_target_is_a_fleets_pattern": _targets("ABOVE/*"),
}
OWN |= {"beside_the_run": _targets("HERE/run", "s3://bucket/run"), "no_target": _targets()}


@way(WAYS)
def the_target_is_a_file_here(place: Place, patched: pytest.MonkeyPatch) -> list[str]:
    """The current folder is its run."""
    write_torch(place.here, 100, seed=1)
    return [next(place.here.glob("*100*")).name]


@way(WAYS)
def the_target_is_a_checkpoint_here(place: Place, patched: pytest.MonkeyPatch) -> list[str]:
    """The current folder is its run."""
    return [write_safetensors(place.here, 100, seed=1)]


@way(WAYS)
def below_records(place: Place, patched: pytest.MonkeyPatch) -> list[str]:
    """A folder of a run that ckptguard knows, whatever the command is about."""
    (place.made[0] / "_ckptguard").mkdir()
    (place.made[0] / "_ckptguard" / "format.json").write_text("{}")
    return ["/no/such/run"]


@way(WAYS)
def replaced_while_it_is_read(place: Place, patched: pytest.MonkeyPatch) -> list[str]:
    """What was opened is not what stands there afterwards."""
    opened, text = os.open, place.file.read_bytes()

    def open_and_replace(path: Any, *how: Any, **more: Any) -> int:
        descriptor = opened(path, *how, **more)
        if os.fspath(path) == "ckptguard.toml":
            patched.setattr(os, "open", opened)
            place.file.rename(place.here / "gone")
            place.file.write_bytes(text)
        return descriptor

    patched.setattr(os, "open", open_and_replace)
    return [str(place.run)]


@way(OWN)
def own_link(place: Place, patched: pytest.MonkeyPatch) -> list[str]:
    """This user's link to this user's file."""
    _linked(place, place.made[0] / "kept" / "mine.toml")
    return [str(place.run)]


@way(OWN)
def roots_file(place: Place, patched: pytest.MonkeyPatch) -> list[str]:
    """Root may do anything as this user."""
    if os.geteuid() == 0:
        patched.setattr(os, "geteuid", lambda: STRANGER)
        for path in (*place.made, place.file):
            os.chown(path, STRANGER, STRANGER)
        os.chown(place.file, 0, 0)
    return [str(place.run)]


@way(OWN)
def a_run_that_does_not_answer(place: Place, patched: pytest.MonkeyPatch) -> list[str]:
    """A target on a mount that hangs is not the current folder, and holds nothing up."""
    looked, hang = os.stat, settings_origin.threading.Event()

    def stat(path: Any, *how: Any, **more: Any) -> os.stat_result:
        if path == "/mnt/dead":
            hang.wait()
        return looked(path, *how, **more)

    patched.setattr(os, "stat", stat)
    patched.setattr(settings_origin, "_ANSWER_SECONDS", 0.05)
    return ["/mnt/dead"]


def meant(name: str) -> Any:
    """The setting's value as `Settings` has it."""
    return getattr(with_table(Settings(), {name: VALUES[name][0]}, "x"), name)


def test_every_setting_is_classified() -> None:
    """A new setting fails here until somebody has decided whether a stranger may set it."""
    assert set(VALUES) == set(Settings.__struct_fields__)
    assert {name for name, (_, harmless) in VALUES.items() if harmless} == HARMLESS
    assert all(meant(name) != getattr(Settings(), name) for name in VALUES)


@pytest.mark.parametrize("name", WAYS)
def test_somebody_elses_file_gives_only_what_is_harmless(name: str, tmp_path: Path) -> None:
    """Each setting alone: a harmless one counts, and of another one sentence says that it does not, and what to do."""
    for setting, (value, harmless) in VALUES.items():
        said: list[str] = []
        with pytest.MonkeyPatch.context() as patched:
            place = make_place(tmp_path / setting, patched)
            place.file.write_text(toml(**{setting: value}))
            found = load_settings(None, {}, WAYS[name](place, patched), say=said.append)
        assert getattr(found, setting) == (meant(setting) if harmless else getattr(Settings(), setting))
        assert len(said) == (0 if harmless else 1), (setting, said)
        assert all(setting in sentence and "because" in sentence for sentence in said)
        assert all(re.search("--config|chmod|copy|again", sentence) for sentence in said)


@pytest.mark.parametrize("name", OWN)
def test_the_users_own_file_gives_everything(name: str, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """All settings at once, and nothing is said."""
    said: list[str] = []
    place.file.write_text(toml(**{setting: value for setting, (value, _) in VALUES.items()}))
    with pytest.MonkeyPatch.context() as patched:
        found = load_settings(None, {}, OWN[name](place, patched), say=said.append)
    assert said == []
    assert all(getattr(found, setting) == meant(setting) for setting in VALUES)


@pytest.mark.parametrize("name", WAYS)
def test_a_named_file_is_the_users_word_for_its_place(name: str, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --config all settings count, unless the file itself is another user's or open to others."""
    if name == "replaced_while_it_is_read":
        return
    place.file.write_text(toml(on_incident=["x"]))
    targets, said = WAYS[name](place, monkeypatch), list[str]()
    found = load_settings("ckptguard.toml", {}, targets, say=said.append)
    still = name.startswith(("mode_", "of_a_stranger"))
    assert (found.on_incident, len(said)) == (((), 1) if still else (("x",), 0))


def test_a_broken_value_of_an_ignored_setting_is_not_looked_at(place: Place) -> None:
    """A stranger's mistake ends no command."""
    place.file.write_text('webhook = 5\nstorage = "x"\nkeep_good = 4\n')
    place.file.chmod(0o666)
    said: list[str] = []
    assert load_settings(None, {}, [], say=said.append) == Settings(keep_good=4)
    assert "webhook, storage ignored" in said[0]


def test_environment_and_flags_are_the_users_words(place: Place) -> None:
    """They count over a stranger's file."""
    place.file.write_text('webhook = "http://elsewhere.example"\n')
    found = load_settings(None, {"CKPTGUARD_ON_INCIDENT": "mine"}, ["."], say=lambda sentence: None, records="/mine")
    assert (found.on_incident, found.records, found.webhook) == (("mine",), "/mine", None)


def test_python_says_it_once(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """A guard, an integration and a call of the API in one process log one warning."""
    place.file.write_text('on_incident = ["x"]\n')
    for _ in range(3):
        assert training_settings(place.here).on_incident == ()
        assert load_settings(None, {}, ["."]).on_incident == ()
    assert [record.levelname for record in caplog.records if "on_incident" in record.message] == ["WARNING"]


@pytest.mark.parametrize("number", ["1" * 5000, "0x" + "f" * 60_000, "-0x" + "f" * 20, "9" * 20])
@pytest.mark.parametrize("name", VALUES)
def test_a_number_that_no_machine_has(name: str, number: str, place: Place) -> None:
    """Python neither reads nor writes one of thousands of digits: a sentence says what is wrong with the file."""
    place.file.write_text(f"{name} = {number}\n")
    with pytest.raises(SettingsError, match=r"ckptguard\.toml"):
        load_settings("ckptguard.toml", {}, [])
    fleet = place.made[0] / "fleet.toml"
    for line in (f"[settings]\n{name} = {number}", f"depth = {number}"):
        fleet.write_text(f'folders = ["."]\n{line}\n')
        with pytest.raises(SettingsError, match=r"fleet\.toml"):
            read_fleet(str(fleet), Settings())


def test_a_file_that_is_found_is_short(place: Place) -> None:
    """Reading one long name of a stranger's file would take an hour. A file that the user names may be longer."""
    place.file.write_text("keep_good = 4\n" + "#" * (1 << 16))
    with pytest.raises(SettingsError, match="too large for a settings file"):
        load_settings(None, {}, [])
    assert load_settings("ckptguard.toml", {}, []).keep_good == 4


@pytest.mark.parametrize("kind", ["fifo", "folder", "socket"])
def test_what_is_no_file_is_no_settings_file(kind: str, place: Place) -> None:
    """Nothing is waited for."""
    if kind == "fifo":
        os.mkfifo(place.file)
    elif kind == "folder":
        place.file.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind("ckptguard.toml")
    assert load_settings(None, {}, []) == Settings()


def test_a_private_group_is_no_other_user(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each user has a group of the same name, files are writable by it; with another member it is not private.
    Root's group is none: containers give it to everybody."""
    import grp
    import pwd

    place.file.write_text('on_incident = ["x"]\n')
    place.file.chmod(0o664)
    found = place.file.stat()
    user = pwd.struct_passwd(("me", "x", found.st_uid, 77, "", "/", "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: user)
    for members, gid, counts in (([], 77, True), (["me"], 77, True), (["me", "eve"], 77, False), ([], 78, False)):
        monkeypatch.setattr(grp, "getgrgid", lambda g, m=members, i=gid: grp.struct_group(("me", "x", i, m)))
        monkeypatch.setattr(settings_origin.os, "fstat", lambda fd, i=gid: _with_group(found, i))
        said: list[str] = []
        assert bool(load_settings("ckptguard.toml", {}, [], say=said.append).on_incident) is counts
        assert bool(said) is not counts


def _with_group(found: os.stat_result, group: int) -> os.stat_result:
    return os.stat_result([*found[:5], group, *found[6:10]])


@pytest.mark.parametrize("setting", VALUES)
def test_a_fleet_file_of_somebody_else(setting: str, place: Place) -> None:
    """Its local folders and harmless settings count, its URLs and other settings do not; that is said."""
    value, harmless = VALUES[setting]
    file = place.made[0] / "fleet.toml"
    write_torch(place.run, 100, seed=1)
    where = [str(place.here), "memory://elsewhere/runs"]
    tables = f"[settings]\n{toml(**{setting: value})}" if setting != "records" else ""
    file.write_text(f'folders = {json.dumps(where)}\n{tables}[runs."*"]\n{toml(**{setting: value})}')
    for mode in (0o644, 0o666):
        file.chmod(mode)
        if setting == "records" and mode == 0o644:
            continue  # one place for several runs
        said: list[str] = []
        rules = read_fleet(str(file), Settings(), say=said.append)
        counts = harmless or mode == 0o644
        assert rules.file.folders == (tuple(where) if mode == 0o644 else (where[0],))
        assert getattr(rules.settings_of("c/run", "x"), setting) == (
            meant(setting) if counts else getattr(Settings(), setting)
        )
        assert len(said) == (0 if mode == 0o644 else 1)
        assert all("URLs of folders" in sentence and (setting in sentence) is not harmless for sentence in said)
    if setting not in ("patterns", "replicas"):
        assert [run.url for run in find_runs(str(file), Settings(), say=said.append).runs] == [str(place.run)]


def test_a_fleet_file_of_somebody_else_with_urls_alone(place: Place) -> None:
    """There is nothing left to look at: one sentence."""
    file = place.made[0] / "fleet.toml"
    file.write_text('folders = ["s3://elsewhere/runs"]\n')
    file.chmod(0o666)
    with pytest.raises(SettingsError, match="other users can change it"):
        read_fleet(str(file), Settings(), say=lambda sentence: None)
