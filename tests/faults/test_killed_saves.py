"""After a save was killed on a local disk, nothing waits for a writer that cannot exist. A writer that may, is waited
for."""

import contextlib
import mmap
import os
import random
import subprocess
import sys

import pytest
import torch
from support import daemon_process
from support.forked import TESTS, Forked
from support.runs import state_dict
from support.views import look

from ckptguard.errors import BusyError
from ckptguard.layouts import Checkpoint
from ckptguard.records.leases import begin_training
from ckptguard.records.run import open_run
from ckptguard.recover.roll_back import GoBack, roll_back
from ckptguard.runs import writers
from ckptguard.runs.writers import writer_of
from ckptguard.upkeep import samples
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome, Severity

SETTINGS = Settings(settle=0.05, scan_interval=1.0)
DEADLINE = 60.0  # seconds, far less than `unfinished_limit`
HANGING_SAVE = """
import json, os, sys, time
import safetensors.torch, torch
from support.runs import state_dict

where, kind, most = sys.argv[1], sys.argv[2], int(sys.argv[3])
class Hanging:
    def __init__(self, path):
        self.file = open(path, "wb", buffering=0)
    def write(self, data):
        global most
        view = memoryview(data).cast("B")
        self.file.write(view[:most])
        most -= len(view)
        if most <= 0:
            print("hangs", flush=True)
            time.sleep(3600)
        return len(view)
    def flush(self):
        pass
    def close(self):
        self.file.close()

def put(name, write):
    file = Hanging(os.path.join(where, name))
    write(file)
    file.close()

state = state_dict(4)
if kind == "file":
    put("net-400.pt", lambda file: torch.save(state, file))
elif kind == "in-place":
    put("net-300.pt", lambda file: torch.save(state, file))
else:
    where = os.path.join(where, "checkpoint-400")
    os.mkdir(where)
    put("model.safetensors", lambda file: file.write(safetensors.torch.save(state)))
    put("optimizer.pt", lambda file: torch.save({"state": {0: {"exp_avg": state["embed.weight"]}}}, file))
    put("scheduler.pt", lambda file: torch.save({"last_epoch": 4}, file))
    put("rng_state.pth", lambda file: torch.save({"cpu": torch.get_rng_state()}, file))
    put("trainer_state.json", lambda file: file.write(json.dumps({"global_step": 400}).encode()))
print("done", flush=True)
time.sleep(3600)
"""


@contextlib.contextmanager
def hanging_save(run, kind, most):
    """A process that hangs in a save after so many bytes, or with its save done."""
    saving = Forked(HANGING_SAVE, run, kind, most, path=(TESTS,), piped=True)
    try:
        saving.stdout.readline()
        yield saving
    finally:
        saving.kill()
        saving.communicate()


@pytest.fixture
def run(tmp_path):
    """A run of two good saves of one file each, made long ago."""
    folder = tmp_path / "run"
    folder.mkdir()
    for step in (200, 300):
        torch.save(state_dict(step), folder / f"net-{step}.pt")
    until(lambda: not reconcile(look(str(folder), SETTINGS), PassNotes()).pending)
    return folder


@pytest.fixture
def torn_run(run):
    """The run with a save that was killed, and that nobody writes."""
    with hanging_save(run, "file", 30_000):
        pass
    until(lambda: writer_of(*_torn(run), 0.05) is None)
    return run


def until(found):
    """Wait until this returns something, and return it."""
    return daemon_process.until(found, "what is waited for", DEADLINE)


def go_back(run):
    """Why a rollback waits, or "" once it was done."""
    try:
        roll_back(look(str(run), SETTINGS), GoBack(reason="test"))
    except BusyError as error:
        return error.message
    return ""


POINTS = [(kind, 1 + random.Random(f"{kind}{n}").randrange(60_000)) for kind in ("file", "in-place") for n in range(6)]
POINTS += [("folder", 1 + random.Random(n).randrange(100_000)) for n in range(8)]


@pytest.mark.parametrize(("kind", "most"), POINTS)
def test_a_killed_save_holds_nothing_up(run, kind, most):
    """While its process lives it is waited for. Killed at any byte, it is judged, and the newest whole save loads."""
    with hanging_save(run, kind, most) as saving:
        said = until(lambda: (why := go_back(run)) and ("open for writing" in why or why == "") and why)
        assert f"process {saving.pid} " in said
        assert next(iter(reconcile(look(str(run), SETTINGS), PassNotes()).pending)).step in (300, 400)
    until(lambda: go_back(run) == "")
    loaded, wanted = torch.load(run / "net-300.pt"), state_dict(300)
    assert all(torch.equal(loaded[name], value) for name, value in wanted.items())
    assert not (run / "checkpoint-400").exists()
    assert not (run / "net-400.pt").exists()


def test_the_daemons_pass_judges_a_killed_save_at_once(run):
    """Its verdict is about the bytes as they are, with the reason."""
    with hanging_save(run, "file", 30_000):
        pass
    notes = PassNotes()
    checked = until(lambda: reconcile(look(str(run), SETTINGS), notes).checked)
    assert [(c.path, c.outcome) for c in checked] == [("net-400.pt", Outcome.BAD)]
    assert any(finding.severity is Severity.ERROR for finding in checked[0].findings)


def test_the_command_goes_back_after_a_kill(run):
    """`ckptguard rollback RUN` ends with 0, without --force."""
    with hanging_save(run, "folder", 30_000):
        pass
    command = [sys.executable, "-m", "ckptguard", "rollback", str(run)]
    environment = {**os.environ, "CKPTGUARD_SETTLE": "0.05"}
    until(lambda: subprocess.run(command, env=environment, capture_output=True).returncode == 0)


SEEN = {
    "a network file system": ("mount_of", lambda path: (path, "nfs4"), "it is on nfs4"),
    "an overlay": ("mount_of", lambda path: (path, "overlay"), "it is on overlay"),
    "an unknown place": ("mount_of", lambda path: ("", ""), "it is on an unknown file system"),
    "a container": ("_HOST_PIDS", "pid:[1]", "this is a container"),
    "an exported disk": ("_EXPORTS", "exports", "its disk is exported by NFS"),
    "no processes": ("_written", None, "cannot be looked at"),
}


@pytest.mark.parametrize("where", SEEN)
def test_elsewhere_a_writer_cannot_be_excluded(run, tmp_path, monkeypatch, where):
    """There a torn save is waited for, the rollback says why and for how long, and `force` does not wait."""
    with hanging_save(run, "file", 30_000):
        pass
    until(lambda: "changed" not in (writer_of(*_torn(run), 0.05) or ""))
    attribute, value, said = SEEN[where]
    if where == "an exported disk":
        value = tmp_path / "exports"
        value.write_text(f"# V\n{tmp_path}\t127.0.0.1(rw)\n")
    if where == "no processes":
        value = _denied
    monkeypatch.setattr(writers, attribute, value)
    with pytest.raises(BusyError, match=said) as error:
        roll_back(look(str(run), SETTINGS), GoBack(reason="test"))
    assert " s without a change" in error.value.hint
    assert "--force" in error.value.hint
    assert [waiting.path for waiting in reconcile(look(str(run), SETTINGS), PassNotes()).pending] == ["net-400.pt"]
    assert roll_back(look(str(run), SETTINGS), GoBack(reason="test", force=True)).known_good.step == 300


def test_an_object_store_does_not_show_writers():
    """Without a local root nothing is known about writers."""
    torn = Checkpoint(path="a.pt", layout="file", series="a.pt", step=None, entries=())
    assert "object store" in writer_of(open_run("memory://killed-saves", must_exist=False), torn, 0.0)


def _denied(pid):
    raise PermissionError(13, "Permission denied")


def _torn(run):
    view = look(str(run), SETTINGS)
    return view.run, view.checkpoint("net-400.pt")


def test_a_guard_that_lives_is_waited_for(torn_run):
    """A guard may pause between two files without one open."""
    begin_training(open_run(str(torn_run)), "net-#.pt", loops=True)
    assert "may still save" in writer_of(*_torn(torn_run), 0.05)


def test_any_way_to_hold_a_file_open_counts(torn_run):
    """A descriptor or a shared mapping for writing counts, in any file of the run but the records; reading does not."""
    torn, log, record = torn_run / "net-400.pt", torn_run / "train.log", torn_run / "_ckptguard" / "lock"
    with open(torn, "rb"), open(record, "ab"):
        assert writer_of(*_torn(torn_run), 0.05) is None
    with open(log, "a"):
        assert "train.log open" in writer_of(*_torn(torn_run), 0.05)
    with open(torn, "r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
    try:
        assert "net-400.pt open" in writer_of(*_torn(torn_run), 0.05)
    finally:
        mapped.close()
    with open(log, "a"):
        log.unlink()
        assert "train.log open" in writer_of(*_torn(torn_run), 0.05)
    assert writer_of(*_torn(torn_run), 0.05) is None


@pytest.mark.parametrize("by", ["itself", "a shell", "a shell, later"])
def test_output_that_goes_into_the_run_holds_nothing_up(torn_run, by):
    """`ckptguard rollback RUN > RUN/log`, and a job whose output is in RUN: neither can be a save."""
    command = [sys.executable, "-m", "ckptguard", "rollback", str(torn_run)]
    lines = {"a shell": '"$@"; true', "a shell, later": 'exec 7>&1; "$@" 2>/dev/null; true'}
    if by != "itself":
        command = ["/bin/sh", "-c", lines[by], "sh", *command]
    with open(torn_run / "slurm-7.out", "w") as log:
        environ = os.environ | {"CKPTGUARD_SETTLE": "0.05"}
        subprocess.run(command, stdout=log, stderr=log, env=environ, timeout=DEADLINE, check=False)
    said = (torn_run / "slurm-7.out").read_text()
    assert "went back to" in said, said
    assert not (torn_run / "net-400.pt").exists()


def test_output_into_the_checkpoint_itself_counts(torn_run, monkeypatch):
    """What a shell writes into the file of a save is the save."""
    monkeypatch.setattr(writers, "_our_output", lambda: {str(torn_run / "net-400.pt")})
    with open(torn_run / "net-400.pt", "r+b"):
        assert "net-400.pt open" in until(
            lambda: (why := writer_of(*_torn(torn_run), 0.05) or "") and "s ago" not in why and why
        )


def test_a_file_that_is_open_by_another_path_counts(run, tmp_path):
    """A writer that came to the file by another path, as through a bind mount, is seen."""
    other = tmp_path / "other"
    other.mkdir()
    os.link(run / "net-300.pt", other / "net-300.pt")
    view = look(str(run), SETTINGS)
    checkpoint = view.checkpoint("net-300.pt")
    with open(other / "net-300.pt", "r+b"):
        said = until(lambda: (why := writer_of(view.run, checkpoint, 0.01) or "") and "s ago" not in why and why)
        assert "open for writing" in said
    until(lambda: writer_of(view.run, checkpoint, 0.01) is None)


def test_processes_are_only_searched_where_a_save_is_unfinished(run, monkeypatch):
    """Whole saves, known or new, cost no look at all processes."""
    torch.save(state_dict(400), run / "net-400.pt")
    os.utime(run / "net-400.pt", (1e9, 1e9))  # so it has been quiet for long
    searched = []
    monkeypatch.setattr(samples, "writer_of", lambda *args: searched.append(args))
    notes = PassNotes()
    checked = until(lambda: reconcile(look(str(run), SETTINGS), notes).checked)
    assert [(c.path, c.outcome) for c in checked] == [("net-400.pt", Outcome.GOOD)]
    assert searched == []


def test_times_that_a_writer_set_are_not_trusted(torn_run):
    """`cp -a` gives files old times: only the kernel's own time of the last change counts."""
    os.utime(torn_run / "net-400.pt", (1.0, 1.0))
    assert "changed" in writer_of(*_torn(torn_run), 600.0)


def test_without_settle_no_pause_proves_anything(run):
    """With `settle = 0` a torn save is waited for, as everywhere where writers cannot be seen."""
    with hanging_save(run, "file", 30_000):
        pass
    assert "settle = 0" in writer_of(*_torn(run), 0.0)
