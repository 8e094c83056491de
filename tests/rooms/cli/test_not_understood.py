"""What may be training state and is verified by nobody is named, wherever a run is looked at."""

import json
import os
import random
from pathlib import Path

import pytest
from ckptguard_daemon.catalogue_feed import CatalogueFeed
from ckptguard_daemon.dashboard.pages import run_page
from ckptguard_daemon.metrics import exposition
from support.counting_storage import counted
from support.runs import QUICK, write_torch
from support.served_runs import watched
from support.views import look

from ckptguard.inspect.status import status
from ckptguard.records.run import open_run
from ckptguard.runs.run_view import RunView
from ckptguard.runs.work import PLAIN
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.patterns import Pattern

NOISE = random.Random(1).randbytes(5000)
HDF5 = b"\x89HDF\r\n\x1a\n" + NOISE
STATE = {
    "model.msgpack": HDF5,
    "policy.joblib": b"PK\x03\x04" + NOISE,
    "train_state_500.msgpack": b"\x82\xa6params" + NOISE,
    "forest.joblib": b"\x80\x04\x95" + NOISE,
    "booster.ubj": b"{L\0\0\0\0\0\0\0\x07learner" + NOISE,
    "model.onnx": b"\x08\x08\x12\x07pytorch" + NOISE,
    "orbax/500/d/0a1b2c": NOISE,
    "orbax/500/manifest.ocdbt": b"\x0c\xdb\x20\xde" + NOISE,
    "700.what": NOISE,
    "g": bytes(5000),
    "deep/a/b/c/d/e/x.ubj": HDF5,
    "rl_model_replay_buffer_80_steps.pkl": b"\x80\x04\x95" + NOISE,
}
OTHERS = {
    "train.log": NOISE,
    "train.log.1": NOISE,
    "events.out.tfevents.1700000000.host.1.0": NOISE,
    "wandb/run-1/files/blob": NOISE,
    "logs/version_0/blob": NOISE,
    "sample_500.png": NOISE,
    "video": b"\0\0\0\x20ftypisom" + NOISE,
    "picture": b"\x89PNG\r\n\x1a\n" + NOISE,
    "stdout": "Verlust 0,5 für Schritt 7\n".encode() * 300,
    "notes": b"loss 0.5\n" * 300,
    "train.py": NOISE,
    "tokenizer.model": NOISE,
    "small.ubj": HDF5[:900],
    "half.ubj.tmp": HDF5,
    ".hidden": NOISE,
    "SHA256SUMS": NOISE,
    "preds.npz": NOISE,
    "metrics.pkl": NOISE,
    "config.json": NOISE,
}


def lay(root: Path, files: dict[str, bytes]) -> Path:
    """Files in a run with one save that we read."""
    write_torch(root, 100, seed=1)
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def named(root: Path, **more: object) -> set[str]:
    """The paths that a listing names."""
    found = look(str(root), QUICK.changed(**more)).listing.not_understood
    return set() if found is None else set(found.paths)


def test_unknown_files_are_named_and_known_ones_are_not(tmp_path: Path) -> None:
    """By name if that says what a file is, else by its first bytes."""
    assert named(lay(tmp_path, {**STATE, **OTHERS})) == set(STATE)
    found = look(str(tmp_path)).listing.not_understood
    assert found is not None
    assert (found.files, found.bytes) == (len(STATE), sum(map(len, STATE.values())))


def test_what_a_pattern_names_is_not(tmp_path: Path) -> None:
    """A checkpoint has a verdict of its own, and what the user ignores is no state."""
    lay(tmp_path, {"model.msgpack": HDF5, "data/blob": NOISE})
    patterns = (Pattern(path="*.msgpack"), Pattern(path="data", ignore=True))
    assert named(tmp_path, patterns=patterns) == set()


def test_first_bytes_are_read_once(tmp_path: Path) -> None:
    """While size and time stay, later listings and passes open nothing. A changed file is opened again."""
    lay(tmp_path, {"blob": NOISE, "stdout": b"loss 0.5\n" * 300})
    run, requests = counted(open_run(str(tmp_path)))
    notes = PassNotes()
    for _ in range(3):
        reconcile(RunView(run, QUICK), notes, assume_quiet=True)
    requests.clear()
    done = reconcile(RunView(run, QUICK), notes, assume_quiet=True)
    assert done.not_understood is not None
    assert done.not_understood.paths == ("blob",)
    assert "run.open" not in requests
    assert RunView(run, QUICK).listing.not_understood == done.not_understood
    assert "run.open" not in requests
    (tmp_path / "blob").write_bytes(NOISE + b"x")
    assert RunView(run, QUICK).listing.not_understood is not None
    assert requests["run.open"] == 1


@pytest.mark.parametrize("command", ["status", "list", "verify"])
def test_commands_name_them_and_say_what_to_do(invoke, document, root, command) -> None:  # type: ignore[no-untyped-def]
    """For people on stderr, and in the document. The exit code is as before: nothing that was verified is bad."""
    lay(root, {"model.msgpack": HDF5, "more.ubj": HDF5})
    assert invoke("verify", root).exit_code == 0
    said = invoke(command, root)
    assert said.exit_code == 0
    assert "2 files are not understood" in said.stderr
    assert "model.msgpack, more.ubj" in said.stderr
    assert "[[patterns]]" in said.stderr
    _, found = document(command, root)
    assert found["not_understood"] == {"files": 2, "bytes": 2 * len(HDF5), "paths": ["model.msgpack", "more.ubj"]}
    for name in ("model.msgpack", "more.ubj"):
        (root / name).unlink()
    said = invoke(command, root)
    assert "not understood" not in said.stderr
    assert document(command, root)[1]["not_understood"] is None


def test_a_run_of_nothing_else_is_no_silence(invoke, root) -> None:  # type: ignore[no-untyped-def]
    """Where there is no checkpoint at all, the reason is said, too."""
    (root / "model.msgpack").write_bytes(HDF5)
    assert "model.msgpack" in invoke("verify", root).stderr
    assert "model.msgpack" in invoke("list", root).stderr
    assert "model.msgpack" in invoke("status", root).stderr


def test_the_daemon_says_it_once_and_shows_it(tmp_path: Path) -> None:
    """One warning in its log, however many passes it makes; a metric; and the page."""
    lay(tmp_path, {"model.msgpack": HDF5})
    logged: list[tuple[str, dict[str, object]]] = []

    def note(event: str, **fields: object) -> None:
        logged.append((event, fields))

    feed = CatalogueFeed()
    run = watched(tmp_path, QUICK, log=note, feed=feed)
    for number in range(3):
        os.utime(tmp_path / "model.msgpack", ns=(number, number))
        assert run.step(PLAIN) is not None
    [fields] = [fields for event, fields in logged if event == "not_understood"]
    assert "model.msgpack" in str(fields["reason"])
    text = exposition([feed.summary(run)], None, 0.0).decode()
    assert f'ckptguard_not_understood_files{{run="{tmp_path}"}} 1.0' in text
    assert run.last_pass.not_understood is not None
    assert status(look(str(tmp_path))).summary.not_understood == 1
    page = json.loads(json.dumps(run_page(feed, run)))
    assert "model.msgpack" in page["not_understood"][0]
