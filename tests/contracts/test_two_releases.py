"""This release and the one before it, on the same runs: each reads what the other wrote, and both say the same of it.

The release before is built as a wheel from the history. Where there is no history, as in a shallow checkout, these
tests are skipped.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import subprocess
import sys
import tarfile
import threading
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
from support.daemon_process import DaemonProcess, save
from support.faults import flip

ROOT = Path(__file__).resolve().parents[2]
COMMIT, VERSION = "3665956bb", "0.1.0"  # the release before this one
PATIENCE = 300.0  # only what hangs takes longer


def install_release_before(folder: Path) -> Path:
    """Build the release before this one, and unpack its wheel into a folder of its own. Skips where there is no
    history."""
    archive = subprocess.run(["git", "archive", COMMIT], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        pytest.skip(f"the history does not reach back to the release before ({COMMIT})")
    pytest.importorskip("hatchling")
    source, place = folder / "source", folder / "installed"
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as members:
        members.extractall(source, filter="data")
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("HATCH_", "COVERAGE"))}
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=source, env=kept, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive_of_wheel:
        archive_of_wheel.extractall(place)
    return place


def environment(installed: Path | None, **further: str) -> dict[str, str]:
    """The environment of a process that imports the release in this folder, or ours."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("CKPTGUARD_", "PYTHONPATH"))}
    path = str(installed) if installed else f"{ROOT}{os.pathsep}{ROOT / 'daemon'}"
    quick = {"CKPTGUARD_SETTLE": "0", "CKPTGUARD_EXECUTOR": "inline"}
    return {**kept, **quick, "PYTHONPATH": path, **further}


class Side:
    """A process with one release (`support/release_side.py`). `call` waits for its answer."""

    def __init__(self, folder: Path, installed: Path | None, **further: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.installed = folder, installed
        self.version = VERSION if installed else "this"
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests/support/release_side.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=folder,
            env=environment(installed, XDG_RUNTIME_DIR=str(folder), **further),
            text=True,
        )
        home = str(installed or ROOT)
        said = self.call("about")
        assert said["file"].startswith(home), said
        assert (said["version"] == VERSION) == (installed is not None), said

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.communicate(timeout=PATIENCE)  # which closes its stdin: it ends

    def call(self, name: str, *arguments: Any) -> Any:
        """What the function of this name answers."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps([name, *arguments]) + "\n")
        stdin.flush()
        watch = threading.Timer(PATIENCE, self._process.kill)
        watch.start()
        line = stdout.readline()
        watch.cancel()
        assert line, f"{name} {arguments} ended the process with {self._process.wait()}"
        return json.loads(line)

    def cli(self, *words: str | Path) -> tuple[int, str]:
        """(exit code, everything printed) of a command."""
        done = self.call("cli", *map(str, words))
        assert "Traceback" not in done["err"], done["err"]
        return done["code"], done["out"] + done["err"]

    def document(self, *words: str | Path) -> tuple[int, Any]:
        """(exit code, document) of a command."""
        done = self.call("cli", *map(str, words), "--json")
        assert done["out"], (words, done)
        return done["code"], json.loads(done["out"])

    def once(self, run: Path) -> int:
        """The exit code of one pass of this release's daemon over a run."""
        command = [sys.executable, "-m", "ckptguard_daemon", str(run), "--once"]
        folder = str(self.folder)
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment(self.installed, XDG_RUNTIME_DIR=folder),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode


FULL = os.environ.get("CKPTGUARD_CAMPAIGN") == "full"
SEEDS, STEPS = (40, 60) if FULL else (4, 14)
BEGINNINGS = ("new", "old", "format 1")  # who writes the first record


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the release before."""
    return install_release_before(tmp_path_factory.mktemp("before"))


@pytest.fixture(scope="module")
def old(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Side]:
    """A process with the release before."""
    with Side(tmp_path_factory.mktemp("old"), installed) as side:
        yield side


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Side]:
    """A process with this release."""
    with Side(tmp_path_factory.mktemp("new"), None) as side:
        yield side


def begin(run: Path, beginning: str) -> None:
    """An empty run; its records have format 1 if a version before 0.1 began them."""
    run.mkdir()
    if beginning == "format 1":
        (run / "_ckptguard").mkdir()
        (run / "_ckptguard/format.json").write_text('{"format":1}\n')


def format_of(run: Path) -> int | None:
    """The format that a run's records state."""
    path = run / "_ckptguard/format.json"
    return int(json.loads(path.read_text())["format"]) if path.exists() else None


def digests(run: Path) -> dict[str, str]:
    """Every file below a run, but for empty locks, with the digest of its bytes."""
    files = [p for p in run.rglob("*") if p.is_file() and not (p.name.endswith("lock") and not p.stat().st_size)]
    return {str(p.relative_to(run)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def seen_by(side: Side, run: Path) -> dict[str, Any]:
    """What a release says of a run: known-good, and the outcome and the places of every checkpoint."""
    code, good = side.document("known-good", run)
    _, listed = side.document("list", run)
    status_code, status = side.document("status", run)
    keys = ("path", "id", "outcome", "changed", "in_place", "kept", "quarantined", "trashed")
    checkpoints = [{key: row[key] for key in keys} for row in listed["checkpoints"]]
    return {
        "known-good": (code, good.get("path"), good.get("id")),
        "checkpoints": sorted(checkpoints, key=lambda row: (row["path"], row["id"] or "")),
        "status": (status_code, status.get("outcomes")),
    }


class Trainer:
    """What a trainer and its disk do to a run, and what was healthy of it: the test's own memory of the truth."""

    def __init__(self, run: Path, chance: random.Random) -> None:
        self.run, self._chance, self._step = run, chance, 0
        self.sound: dict[int, set[bytes]] = {}  # by step: what may be called good

    def save(self) -> str:
        """The next save. One in four has NaN."""
        self._step += 1
        sick = self._chance.random() < 0.25
        path = save(self.run, self._step, nan=sick)
        if not sick:
            self.sound[self._step] = {path.read_bytes()}
        return f"save {path.name}{' with NaN' if sick else ''}"

    def rotate(self) -> str:
        """Remove the oldest save of those that are there."""
        there = sorted(self.run.glob("net-*.safetensors"), key=step_of)
        if len(there) > 2:
            there[0].unlink()
        return "rotate"

    def damage(self) -> str:
        """Flip a bit of a save."""
        there = sorted(self.run.glob("net-*.safetensors"), key=step_of)
        if there:
            flip(chosen := self._chance.choice(there))
            if not list((self.run / "_ckptguard/manifests").rglob(f"{step_of(chosen):012d}.*.json")):
                self.accept(chosen)  # nothing knows that it was another one
            return f"damage {chosen.name}"
        return "damage nothing"

    def accept(self, path: Path) -> None:
        """What a healthy save holds now is what is meant."""
        if path.is_file() and step_of(path) in self.sound:
            self.sound[step_of(path)].add(path.read_bytes())

    def newest(self) -> Path:
        """The newest save that is there, or the run."""
        return max(self.run.glob("net-*.safetensors"), key=step_of, default=self.run)


def step_of(path: Path) -> int:
    """The step in a name."""
    return int(path.name.split("-")[1].split(".")[0])


def operations(trainer: Trainer, elsewhere: Path) -> dict[str, tuple[str | Path, ...]]:
    """Every command that writes records, with arguments that mean something now."""
    run, ckpt = trainer.run, trainer.newest()
    return {
        "verify": ("verify", run),
        "scrub": ("scrub", run),
        "known-good": ("known-good", run, "--read"),
        "rollback": ("rollback", run),
        "restore": ("restore", run, "--to", elsewhere / f"restored-{len(list(elsewhere.iterdir()))}"),
        "clear": ("clear", run, ckpt, "--reason", "looked at it"),
        "reseal": ("reseal", ckpt),
        "accept": ("accept", run, ckpt),
        "pin": ("pin", ckpt, "--note", "the paper's"),
        "unpin": ("unpin", ckpt),
        "prune": ("prune", run, "--keep-last", "2"),
        "replicate": ("replicate", run, "--to", elsewhere / "replica"),
        "repair": ("repair", run),
        "status": ("status", run),
    }


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(SEEDS))
def test_two_releases_take_turns_on_one_run(old: Side, new: Side, tmp_path: Path, seed: int) -> None:
    """After each operation of either release both name the same known-good and the same outcomes; what is known-good
    is whole; and this release never raises the format."""
    chance = random.Random(seed)
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    begin(run, BEGINNINGS[seed % len(BEGINNINGS)])
    elsewhere.mkdir()
    trainer = Trainer(run, chance)
    history = [trainer.save()]
    first = old if BEGINNINGS[seed % len(BEGINNINGS)] == "old" else new
    began = format_of(run)
    first.cli("verify", run)
    assert first is old or format_of(run) == (began or 2)
    for _ in range(STEPS):
        for act in chance.choices((trainer.save, trainer.rotate, trainer.damage), (6, 1, 1), k=chance.randint(0, 2)):
            history.append(act())
        side = chance.choice((old, new))
        before = format_of(run)
        if chance.random() < 0.15:
            history.append(f"{side.version} daemon --once: {side.once(run)}")
        else:
            name, words = chance.choice(list(operations(trainer, elsewhere).items()))
            if name == "reseal":
                trainer.accept(Path(words[1]))
            code, said = side.cli(*words)
            history.append(f"{side.version} {name}: {code}")
            assert "--help" not in said, (history, said)  # which would be our own mistake
            assert code in (0, 1, 2, 3, 4, 10, 11, 13), (history, said)
            assert "format" not in said or code == 0, (history, said)
        after = format_of(run)
        assert after == before or side is old or before is None, history
        assert after is None or after <= 2, history
        path = (
            chance.choice((old, new)).document("known-good", run, "--read")[1].get("path")
        )  # rot shows when it is read
        if path is not None:
            assert Path(path).read_bytes() in trainer.sound[step_of(Path(path))], (history, path)
        order = [old, new] if chance.random() < 0.5 else [new, old]
        views = {one.version: seen_by(one, run) for one in order}
        assert views[old.version] == views[new.version], history
        replica = elsewhere / "replica"
        if replica.exists():
            assert seen_by(old, replica) == seen_by(new, replica), history


@pytest.mark.parametrize("beginning", BEGINNINGS)
@pytest.mark.parametrize("order", ["old first", "new first"])
def test_a_training_goes_on_under_the_other_release(
    old: Side, new: Side, tmp_path: Path, order: str, beginning: str
) -> None:
    """Two guards of two releases continue each other's training, through an incident and a way back each."""
    pytest.importorskip("torch")
    run = tmp_path / "run"
    begin(run, beginning)
    if beginning != "format 1":
        save(run, 900)
        (old if beginning == "old" else new).cli("verify", run)
    sides = [old, new] if order == "old first" else [new, old]
    for number in range(3):
        last = 6 * number + 6
        done = sides[number % 2].call("train", str(run), last, [last - 1], "off")
        assert not done["error"], (number, done)
        assert done["done"][0] == last - 5, (number, done)  # it resumed where the other one ended
        assert done["done"].count(last - 1) == 2, (number, done)  # it went back
        assert seen_by(old, run) == seen_by(new, run)
        incidents = [side.document("incidents", run)[1]["incidents"] for side in (old, new)]
        assert incidents[0] == incidents[1]
        assert len(incidents[0]) == number + 1


@pytest.mark.parametrize("beginning", BEGINNINGS)
@pytest.mark.parametrize("guardian", ["old", "new"])
def test_a_guard_and_a_daemon_of_two_releases_work_together(
    installed: Path, old: Side, new: Side, tmp_path: Path, guardian: str, beginning: str
) -> None:
    """A daemon of one release guards what the other release saves; the other's guard asks it, and trains beside it."""
    pytest.importorskip("torch")
    run, asker = tmp_path / "run", new if guardian == "old" else old
    begin(run, beginning)
    path = environment(installed if guardian == "old" else None)["PYTHONPATH"]
    daemon = DaemonProcess(tmp_path, run, PYTHONPATH=path)
    try:
        version = daemon.logged("started")["version"]
        assert (version == VERSION) == (guardian == "old")
        save(run, 1)
        save(run, 2, nan=True)
        assert daemon.outcome(2) == "bad"
        assert daemon.known_good(1)["id"] == "1.1"
        said = asker.call("ask_daemon", str(run))
        assert said["alive"]
        assert said["known_good"] == "1.1"
        noted = said["incident"]
        assert noted is not None
        for side in (old, new):
            assert noted in {i["id"] for i in side.document("incidents", run)[1]["incidents"]}
        done = asker.call("train", str(tmp_path / "run"), 4, [3], "auto")
        assert not done["error"], done
        assert done["done"].count(3) == 2
        assert daemon.outcome(4) == "good"
    finally:
        assert daemon.stop() == 0, daemon.log_path.read_text()
    assert seen_by(old, run) == seen_by(new, run)


@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_this_release_never_raises_a_format(old: Side, new: Side, tmp_path: Path, beginning: str) -> None:
    """Whatever this release does with a run, its format stays; and a guard of the release before still starts."""
    pytest.importorskip("torch")
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    begin(run, beginning)
    elsewhere.mkdir()
    trainer = Trainer(run, random.Random(3))
    for _ in range(4):
        trainer.save()
    (old if beginning == "old" else new).cli("verify", run)
    before = format_of(run)
    assert before == (1 if beginning == "format 1" else 2)
    for words in operations(trainer, elsewhere).values():
        new.cli(*words)
        assert format_of(run) == before, words
    new.once(run)
    assert not new.call("train", str(run), 4, [3], "off")["error"]
    assert format_of(run) == before
    assert format_of(elsewhere / "replica") == 2
    assert seen_by(old, run) == seen_by(new, run)
    assert not old.call("train", str(run), 6, [5], "off")["error"]


def test_only_a_person_raises_a_format_and_the_release_before_then_refuses_it(
    installed: Path, old: Side, tmp_path: Path
) -> None:
    """A release that knows a newer format writes the one of before, until a person raises it. Then the release before
    says one sentence, and changes nothing."""
    pytest.importorskip("torch")
    run = tmp_path / "run"
    run.mkdir()
    for step in (1, 2):
        save(run, step)
    (tmp_path / "elsewhere").mkdir()
    with (
        Side(tmp_path / "next", None, RELEASE_KNOWS_FORMAT="3") as coming,
        Side(tmp_path / "asked", None, RELEASE_KNOWS_FORMAT="3", CKPTGUARD_RECORDS_FORMAT="3") as asked,
    ):
        assert coming.cli("verify", run)[0] == 0
        assert format_of(run) == 2
        assert seen_by(old, run) == seen_by(coming, run)
        assert asked.cli("verify", run)[0] == 0  # the setting is for new runs, and for `migrate`
        assert format_of(run) == 2
        assert asked.document("migrate", run, "--dry-run")[1]["raised"] is False
        assert format_of(run) == 2
        assert asked.document("migrate", run)[1]["raised"] is True
        assert format_of(run) == 3
        before = digests(run)
        for name, words in operations(Trainer(run, random.Random(0)), tmp_path / "elsewhere").items():
            code, said = old.cli(*words)
            assert code == 1, (name, said)
            assert "have format 3; this version knows up to 2" in said, (name, said)
        assert old.once(run) == 1
        refused = old.call("train", str(run), 4, [], "off")
        assert refused["error"] == "RecordsError"
        assert "have format 3; this version knows up to 2" in refused["message"]
        assert digests(run) == before
        assert coming.document("known-good", run)[1]["id"] == "2.1"
        fresh = tmp_path / "fresh"
        fresh.mkdir()
        save(fresh, 1)
        assert asked.cli("verify", fresh)[0] == 0
        assert format_of(fresh) == 3


def test_the_table_of_formats_is_true(old: Side, new: Side) -> None:
    """What this release writes the one before reads, and the table says of each what its code says."""
    from ckptguard.values import record_formats as table

    rows = {
        "mark": table.MARK,
        "samples": table.SAMPLES,
        "action": table.ACTION,
    }
    theirs, ours = old.call("formats"), new.call("formats")
    for name, written in ours.items():
        row = rows.get(name, table.PLAIN)
        assert (written, theirs[name]) == (row.writes, row.before_writes), name


def test_manifests_and_verdicts_state_their_format(old: Side, new: Side, tmp_path: Path) -> None:
    """What an older release must refuse can only be told by a stated number: an absent one is that of release 0.1."""
    from ckptguard.values import record_formats as table

    run = tmp_path / "run"
    run.mkdir()
    save(run, 1)
    assert new.cli("verify", run)[0] == 0
    for folder, row in (("manifests", table.MANIFEST), ("ledger", table.VERDICT)):
        (record,) = (run / "_ckptguard" / folder).rglob("*.json")
        line, _, _ = record.read_bytes().partition(b"\n")
        assert json.loads(line)["format"] == row.writes
        raised = json.dumps({**json.loads(line), "format": row.before_reads + 1}).encode() + b"\n"
        record.write_bytes(raised + f"crc32 {zlib.crc32(raised):08x}\n".encode())
        for side in (old, new):
            assert side.document("known-good", run)[0] == 13, (side.version, folder)
        record.write_bytes(line + b"\n" + f"crc32 {zlib.crc32(line + chr(10).encode()):08x}\n".encode())
        assert seen_by(old, run) == seen_by(new, run)


def test_both_releases_ignore_what_they_do_not_know(old: Side, new: Side, tmp_path: Path) -> None:
    """A field in any record, and a record or folder of a new kind, changes nothing that either release says or does."""
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run.mkdir()
    elsewhere.mkdir()
    trainer = Trainer(run, random.Random(1))
    for _ in range(4):
        trainer.save()
    new.once(run)  # it keeps copies
    for words in operations(trainer, elsewhere).values():
        new.cli(*words)
    before = seen_by(new, run)
    records = run / "_ckptguard"
    for path in [p for p in records.rglob("*.json") if p.name != "format.json"]:
        line, _, check = path.read_bytes().partition(b"\n")
        found = json.loads(line)
        if not isinstance(found, dict) or not line:
            continue
        text = json.dumps({**found, "to_come": {"a": [1]}}).encode() + b"\n"
        path.write_bytes(text + (f"crc32 {zlib.crc32(text):08x}\n".encode() if check else b""))
    for folder in ("", "to_come/", "ledger/", "kept/", "pins/"):
        name = f"{folder}to_come.json"
        (records / name).parent.mkdir(exist_ok=True)
        (records / name).write_text('{"format": 1, "to_come": true}\n')
    assert seen_by(old, run) == seen_by(new, run) == before
    for side in (old, new):
        for name, words in operations(trainer, elsewhere).items():
            code, said = side.cli(*words)
            assert "cannot be read" not in said, (side.version, name, said)
            assert code != 1, (side.version, name, said)
    assert seen_by(old, run) == seen_by(new, run)


def test_workers_of_two_releases_refuse_each_other(old: Side, new: Side) -> None:
    """A coordinator says which version its worker has; a worker does nothing for another version's coordinator."""
    for ours, theirs in ((new, old), (old, new)):
        said, mine = theirs.call("software"), ours.call("software")
        task = {"software": mine["software"], "verb": "plan", "url": "/nowhere", "name": "nowhere"}
        assert "has other software: ckptguard" in ours.call("accepts", said, task)["refused"]
        assert theirs.call("accepts", mine, task)["answer"]["differs"] == said["software"]
