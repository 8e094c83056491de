"""Commands come only from the user: a settings file that somebody else may have written starts nothing, connects to
nothing and gives no storage options, whichever command reads it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.daemon_process import save
from support.web_listener import Listener, listening

import ckptguard
from ckptguard.cli.entry import COMMANDS
from ckptguard.storage import opening
from ckptguard.values.settings import environment_of, parse_settings

PATIENCE = 250.0
STARTS = ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "os.fork", "os.forkpty")
CONNECTS = ("socket.connect", "socket.getaddrinfo", "socket.sendto", "urllib.Request", "smtplib.connect")
# What each command is asked to do with the run R, its checkpoints GOOD and BAD, and a new folder NEW.
WORDS: dict[str, tuple[str, ...]] = {
    "verify": ("R",),
    "scrub": ("R",),
    "show": ("GOOD",),
    "diff": ("GOOD", "BAD"),
    "bisect": ("R",),
    "sums": ("GOOD",),
    "status": ("R",),
    "list": ("R",),
    "incidents": ("R",),
    "incident": ("R",),
    "known-good": ("R",),
    "forget": ("R",),
    "clean": ("R", "--dry-run"),
    "rollback": ("R",),
    "restore": ("R", "--to", "NEW"),
    "gate": ("R", "--dry-run"),
    "replicate": ("R",),
    "repair": ("R",),
    "prune": ("R",),
    "pin": ("GOOD",),
    "unpin": ("GOOD",),
    "fleet": ("verify", "R"),
    "clear": ("R", "200", "--reason", "known"),
    "reseal": ("BAD",),
    "accept": ("R", "200"),
    "doctor": ("R",),
    "config": ("R",),
    "migrate": ("R",),
    "notify": ("R", "--test"),
    "silence": ("R", "--until", "8h"),
}
AS_PROCESSES = {"supervise", "dashboard", "gate"}
READ_NO_SETTINGS = {"token", "completion"}
_seen: list[str] | None = None


def _hook(event: str, args: tuple[object, ...]) -> None:
    if _seen is not None and event in (*STARTS, *CONNECTS):
        _seen.append(f"{event} {args!r:.200}")


sys.addaudithook(_hook)


@pytest.fixture
def seen() -> Iterator[list[str]]:
    """What is started or connected to during a test, by Python's own audit."""
    global _seen
    _seen = []
    yield _seen
    _seen = None


@pytest.fixture
def web() -> Iterator[Listener]:
    """Where the hostile file would have people told."""
    with listening() as listener:
        yield listener


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with a verified checkpoint and a new one that holds NaN."""
    folder = tmp_path / "work" / "run"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    save(folder, 100)
    ckptguard.verify(folder)
    save(folder, 200, nan=True)
    return folder


def hooks(web: Listener, marker: Path) -> str:
    """Settings that tell people."""
    return f'on_incident = ["touch", {json.dumps(str(marker))}]\nwebhook = "{web.url}"\n'


def hostile(web: Listener, folder: Path) -> str:
    """A settings file with all that must come from the user."""
    return (
        hooks(web, folder / "marker")
        + f'notify = ["{web.address}"]\nreplicas = ["memory://elsewhere/{{run}}"]\n'
        + f"records = {json.dumps(str(folder / 'records'))}\nrepair = true\nkeep_last = 1\nprune_failed = true\n"
        + 'trash_grace = 0.0\ntrust_globals = ["os.system"]\n[storage.memory]\nsecret = "x"\n'
    )


def arrange(way: str, run: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Put the file where it is found, and go there. Returns how the run is named."""
    here = run if way.startswith("inside") else run.parent
    file = here / "ckptguard.toml"
    file.write_text(text)
    monkeypatch.chdir(here)
    if way == "writable":
        file.chmod(0o666)
    elif way == "folder":
        here.chmod(0o777)
    elif way == "stranger":
        if os.geteuid() != 0:
            pytest.skip("only root can give a file to another user")
        os.chown(file, 12345, 12345)
    return "." if way == "inside" else str(run)


WAYS = ("inside", "inside, by its whole path", "writable", "folder", "stranger")


def worded(words: tuple[str, ...], named: str, run: Path) -> list[str]:
    """The arguments of a command."""
    inside = run / "net-100.safetensors", run / "net-200.safetensors"
    known = {"R": named, "GOOD": str(inside[0]), "BAD": str(inside[1]), "NEW": str(run.parent / "new")}
    return [known.get(word, word) for word in words]


def test_every_command_is_tried() -> None:
    """A new command fails here until it has a line above."""
    assert {*WORDS, *AS_PROCESSES, *READ_NO_SETTINGS} == set(COMMANDS)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("command", WORDS)
def test_a_strangers_file_starts_nothing_and_connects_to_nothing(
    command: str, way: str, run: Path, invoke: Any, web: Listener, seen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence says what is ignored, nothing is started, nobody is asked, and no option reaches a storage."""
    opened: list[str] = []
    monkeypatch.setattr(opening, "_connect", lambda url, given: opened.append(url))
    named = arrange(way, run, hostile(web, run.parent), monkeypatch)
    seen.clear()
    done = invoke(command, *worded(WORDS[command], named, run))
    assert seen == []
    assert opened == []
    assert web.posted == []
    assert not (run.parent / "marker").exists()
    assert not (run.parent / "records").exists()
    assert (run / "net-200.safetensors").exists() or command == "rollback"
    ignored = [line for line in done.stderr.splitlines() if "ckptguard.toml" in line and "ignored" in line]
    assert len(ignored) == 1, done.stderr
    assert all(f" {name}" in ignored[0] for name in ("on_incident", "webhook", "replicas", "storage", "records"))


@pytest.mark.parametrize("command", ["verify", "fleet", "notify"])
def test_the_users_own_file_is_obeyed(
    command: str, run: Path, invoke: Any, web: Listener, seen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same watch sees the same commands start something and connect, with a file of the user's or one that is
    named."""
    marker = run.parent / "marker"
    (run.parent / "ckptguard.toml").write_text(hooks(web, marker))
    monkeypatch.chdir(run.parent)
    done = invoke(command, *worded(WORDS[command], str(run), run))
    assert any("Popen" in event for event in seen), done.stderr
    assert any("socket.connect" in event for event in seen)
    assert marker.exists()
    assert web.posted
    marker.unlink()
    (run.parent / "ckptguard.toml").rename(run / "ckptguard.toml")
    monkeypatch.chdir(run)
    assert invoke("notify", "--test", ".", "--config", "ckptguard.toml").exit_code == 0
    assert marker.exists()


API = {
    "verify": lambda run: ckptguard.verify(run),
    "known_good": lambda run: ckptguard.known_good(run),
    "restore": lambda run: ckptguard.restore(run, run.parent / "new"),
    "checkpoints": lambda run: ckptguard.checkpoints(run),
    "rollback": lambda run: ckptguard.rollback(run),
    "diff": lambda run: ckptguard.diff(run / "net-100.safetensors", run / "net-200.safetensors"),
    "incidents": lambda run: ckptguard.incidents(run),
    "load": lambda run: ckptguard.load(run),
    "seal": lambda run: ckptguard.seal(run / "net-100.safetensors"),
    "check_pretrained": lambda run: ckptguard.check_pretrained(run / "net-100.safetensors"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("verb", API)
def test_a_strangers_file_means_nothing_to_python_either(
    verb: str, way: str, run: Path, web: Listener, seen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same of the functions."""
    monkeypatch.setattr(opening, "_connect", lambda url, given: pytest.fail(url))
    arrange(way, run, hostile(web, run.parent), monkeypatch)
    seen.clear()
    API[verb](run)
    assert (seen, web.posted) == ([], [])
    assert not (run.parent / "marker").exists()
    assert not (run.parent / "records").exists()


PROCESSES: dict[str, tuple[str, ...]] = {
    "supervise": ("ckptguard", "supervise", "--max-rollbacks", "0", "R", "--", "true"),
    "gate": ("ckptguard", "gate", "R", "--", "true"),
    "daemon --once": ("ckptguard_daemon", "--once", "R"),
    "daemon --once --fleet": ("ckptguard_daemon", "--once", "--fleet", "R"),
    "fleet --engine processes": ("ckptguard", "fleet", "verify", "R", "--engine", "processes"),
}


@pytest.mark.parametrize("way", ["inside", "writable"])
@pytest.mark.parametrize("name", PROCESSES)
def test_a_process_obeys_no_strangers_file(
    name: str, way: str, run: Path, web: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot run inside the test: it is said once, nothing is started, and nobody is asked."""
    named = arrange(way, run, hooks(web, run.parent / "marker"), monkeypatch)
    done = _start(*worded(PROCESSES[name], named, run))
    assert "Traceback" not in done.stderr
    assert done.stderr.count("on_incident, webhook ignored") == 1, done.stderr
    assert (web.posted, (run.parent / "marker").exists()) == ([], False)


@pytest.mark.parametrize("name", sorted({*PROCESSES} - {"gate"}))  # which tells nobody
def test_a_process_obeys_the_users_file(name: str, run: Path, web: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with a file of the user's own: the check above can fail."""
    (run.parent / "ckptguard.toml").write_text(hooks(web, run.parent / "marker"))
    monkeypatch.chdir(run.parent)
    done = _start(*worded(PROCESSES[name], str(run), run))
    assert "ignored" not in done.stderr
    assert web.posted, done.stderr
    assert (run.parent / "marker").exists()


def _start(module: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command as its script does: without -P, Python would import from the current folder by our own doing."""
    return subprocess.run(
        [sys.executable, "-P", "-m", module, *words],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={"CKPTGUARD_SETTLE": "0", **os.environ},
        check=False,
    )


@pytest.mark.parametrize("name", ["fleet --engine processes", "dashboard", "TrainingGuard"])
def test_nothing_is_imported_from_the_current_folder(
    name: str, run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A downloaded run may hold modules by the names of ours and of Python's own: no process of ours takes them."""
    marker = run.parent / "imported"
    for module in ("multiprocessing", "msgspec", "click", "ckptguard", "ckptguard_daemon", "concurrent"):
        (run / module).mkdir()
        (run / module / "__init__.py").write_text(f"open({str(marker)!r}, 'w')\n")
    monkeypatch.chdir(run)
    if name == "dashboard":
        with subprocess.Popen(
            [sys.executable, "-P", "-m", "ckptguard", "dashboard", "."], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert "http" in process.stdout.readline()
            process.terminate()
    elif name == "TrainingGuard":
        program = (
            "import time; from ckptguard.records.run import open_run; from ckptguard.training.client import *\n"
            "from ckptguard.values.settings import Settings\n"
            "run = open_run('.'); child = ensure_daemon(run, Settings())\n"
            "until = time.monotonic() + 200\n"
            "while not is_alive(run) and time.monotonic() < until: time.sleep(0.05)\n"
            "print(is_alive(run)); child.stop()"
        )
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        command = [sys.executable, "-P", "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
        assert done.stdout == "True\n", done.stderr
    else:
        done = _start(*worded(PROCESSES[name], ".", run))
        assert done.returncode == 3, done.stderr
    assert not marker.exists()


def test_the_settings_that_a_guard_hands_on_stay_the_users(
    run: Path, web: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that a guard starts in the run reads the same file in the same way: what the guard hands on counts, what
    the file says does not."""
    arrange("inside", run, hooks(web, run.parent / "marker"), monkeypatch)
    mine = parse_settings(f'settle = 0.0\non_incident = ["touch", "{run.parent}/mine"]', "x")
    for name, value in environment_of(mine, {}).items():
        monkeypatch.setenv(name, value)
    done = _start("ckptguard_daemon", "--once", str(run))
    assert done.returncode == 3, done.stderr
    assert (run.parent / "mine").exists()
    assert (web.posted, (run.parent / "marker").exists()) == ([], False)


def test_a_download_does_not_say_that_its_own_nan_is_fine(tmp_path: Path) -> None:
    """Its verdict is the same with and without a settings file in it. A file that the user names counts."""
    save(tmp_path, 100, nan=True)
    (tmp_path / "ckptguard.toml").write_text('allow_nonfinite = ["*"]\n')

    def verify(*options: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "ckptguard", "verify", "net-100.safetensors", *options]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=False)
        return done.returncode, done.stderr

    code, said = verify()
    assert (code, "allow_nonfinite ignored" in said) == (3, True)
    assert verify("--config", "ckptguard.toml")[0] == 0
