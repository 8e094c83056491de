"""Which plugins are there, by metadata alone, and which of them are used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.plugins import forget, plant
from support.runs import QUICK

from ckptguard.plugins.call import PluginError, call_plugin
from ckptguard.plugins.installed import find_plugin, format_plugin, installed
from ckptguard.plugins.listing import listed_plugins
from ckptguard.values.verdict import Outcome
from ckptguard.verification.target import verify_target

READ = """
from ckptguard.plugins import FileContents, StoredTensor
def read(file):
    size = len(file.read())
    return FileContents((StoredTensor("w", "float32", (size // 4,), 0),))
"""
MUST_NOT_RUN = "raise SystemExit('it was imported')"


@pytest.mark.parametrize(
    ("point", "says"),
    [
        ("weird.v2", "it is for version 2 of the interface of plugins, and this ckptguard has version 1"),
        ("weird", "does not end in the version of the interface, such as .v1"),
        ("weird.vx", "does not end in the version of the interface, such as .v1"),
    ],
)
def test_another_interface_is_refused_with_a_sentence(point: str, says: str, tmp_path: Path, plugins: Path) -> None:
    """It is listed, never imported, and its files are not understood."""
    plant(plugins, [("formats", point, "read")], MUST_NOT_RUN)
    (one,) = installed()
    assert says in one.refused
    with pytest.raises(PluginError, match="is not used"):
        call_plugin(one, "", type(None), memory=2**30)
    if one.interface is not None:
        (tmp_path / "m.weird").write_bytes(bytes(range(1, 255)) * 80)
        report = verify_target(str(tmp_path / "m.weird"), QUICK)
        assert (report.outcome, says in report.findings[0].message) == (Outcome.PENDING, True)


def test_two_of_one_name_are_both_refused(plugins: Path) -> None:
    """Neither may win by chance."""
    plant(plugins, [("formats", "weird.v1", "read")], READ)
    plant(plugins, [("formats", "weird.v1", "read")], READ, package="others-too")
    assert [bool(plugin.refused) for plugin in installed()] == [True, True]


def test_the_longest_end_of_a_name_wins(plugins: Path) -> None:
    """A format for `.a.weird` reads such a file, also where another is for `.weird`."""
    plant(plugins, [("formats", "weird.v1", "read"), ("formats", "a.weird.v1", "read")], READ)
    names = {path: getattr(format_plugin(path), "name", None) for path in ("x/m.a.WEIRD", "m.weird", "weird", "mweird")}
    assert names == {"x/m.a.WEIRD": "a.weird", "m.weird": "weird", "weird": None, "mweird": None}


def test_plugins_are_listed_without_running_them(plugins: Path) -> None:
    """Each with its use, or why it has none."""
    points = [
        ("checks", "one.v1", "x"),
        ("checks", "two.v1", "x"),
        ("formats", "weird.v1", "x"),
        ("channels", "l.v9", "x"),
    ]
    plant(plugins, points, MUST_NOT_RUN)
    found = {one.name: (one.used, one.why_not) for one in listed_plugins(QUICK.changed(checks=("one",)))}
    assert found["one"] == ("for each verdict", "")
    assert found["two"] == ("", "the setting `checks` does not name it")
    assert found["weird"] == ("for local files that end in .weird", "")
    assert "version 9" in found["l"][1]
    assert {one.why_not for one in listed_plugins(QUICK.changed(no_plugins=True))} >= {"plugins are turned off"}
    assert find_plugin("formats", "one") is None


def test_a_format_is_used_and_recorded_and_can_be_turned_off(tmp_path: Path, plugins: Path) -> None:
    """Its name and version stay with the verdict; without plugins the file is as if none was installed."""
    plant(plugins, [("formats", "weird.v1", "read")], READ)
    root = tmp_path / "run"
    root.mkdir()
    (root / "model_1.weird").write_bytes(b"\x00\x00\x80\x3f\x00\x00\x00\x40" * 500)
    off = QUICK.changed(no_plugins=True)
    assert verify_target(str(root / "model_1.weird"), off).outcome is Outcome.PENDING
    (checked,) = verify_target(str(root), QUICK).checkpoints
    assert checked.outcome is Outcome.GOOD
    (entry,) = (root / "_ckptguard").glob("ledger/*/*.json")
    assert json.loads(entry.read_bytes().splitlines()[0])["plugins"] == ["formats/weird 1.5"]
    (again,) = verify_target(str(root), off).checkpoints  # what was sealed stays a checkpoint
    assert again.outcome is Outcome.SUSPECT
    (root / "model_1.weird").write_bytes(b"\x00\x00\xc0\x7f\x00\x00\x00\x40" * 500)
    assert verify_target(str(root), QUICK).outcome is Outcome.BAD


OTHERS = {
    "no metadata at all": {},
    "no metadata, and entry points": {"entry_points.txt": b"[ckptguard.formats]\nweird.v1 = a:b\n"},
    "a file that is no text": {"METADATA": b"Name: broken\n", "entry_points.txt": b"[ckptguard.checks]\n\xff = a:b\n"},
    "a line that is no entry": {"METADATA": b"Name: broken\n", "entry_points.txt": b"[console_scripts]\nnonsense\n"},
}


@pytest.mark.parametrize("folder", ["broken-1.0.dist-info", "-.dist-info"])
@pytest.mark.parametrize("how", OTHERS)
def test_a_damaged_package_is_no_trouble(how: str, folder: str, plugins: Path) -> None:
    """What pip left half installed adds no plugin, and takes none away."""
    plant(plugins, [("formats", "weird.v1", "read")], READ)
    (plugins / folder).mkdir()
    for name, content in OTHERS[how].items():
        (plugins / folder / name).write_bytes(content)
    forget()
    assert [(one.name, one.package, one.refused) for one in installed()] == [("weird", "others", "")]


def test_names_that_differ_in_case_are_one_name(plugins: Path) -> None:
    """Ends of file names are compared without case, so one of the two would win by chance."""
    plant(plugins, [("formats", "weird.v1", "read")], READ)
    plant(plugins, [("formats", "Weird.v1", "read")], READ, package="others-too")
    assert [bool(plugin.refused) for plugin in installed()] == [True, True]


@pytest.mark.parametrize("how", ["-c", "-m", "a script"])
def test_what_lies_in_a_run_is_not_installed(how: str, tmp_path: Path) -> None:
    """Metadata of a package among the files of a run makes nothing run, however Python was started in its folder."""
    root = tmp_path / "run"
    root.mkdir()
    plant(root, [("formats", "weird.v1", "loads")], f"open({str(tmp_path / 'ran')!r}, 'w')")
    (root / "model_1.weird").write_bytes(bytes(range(1, 255)) * 80)
    (root / "script.py").write_text("import ckptguard.plugins.installed as i; print(len(i.installed()))")
    code = ["-c", (root / "script.py").read_text()]
    words = {"-c": code, "-m": ["-m", "ckptguard", "verify", "."], "a script": [str(root / "script.py")]}
    place = "/" if how == "a script" else root
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, *words[how]], cwd=place, env=environ, capture_output=True, text=True, check=False
    )
    assert not (tmp_path / "ran").exists()
    assert done.stdout.strip() == ("" if how == "-m" else "0"), done.stderr
    assert how != "-m" or "not understood" in done.stderr
