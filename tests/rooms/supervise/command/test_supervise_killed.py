"""Supervise that is killed at any moment: the next one goes on where it was, and there is never a second command."""

import os
import re
import signal
from pathlib import Path

import pytest
from supervised_training import PATIENCE, is_there, newest, starts, until
from support.views import look

from ckptguard.errors import BusyError
from ckptguard.records.incidents import list_incidents
from ckptguard.records.run import open_run
from ckptguard.supervise.lock_file import Supervision
from ckptguard.upkeep.leftovers import collect_leftovers

LONG_AGO = 1_000_000_000
KILLED = Path(__file__).with_name("killed_supervise.py")
# Whoever runs beside another one leaves a note.
ALONE = """
import fcntl
alone = open(f"{run}.alone", "w")
try:
    fcntl.flock(alone, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    note(run, "two")
"""
# Turns sick, with no other save in place, and kills who asks it to end, instead of ending.
SICK_AND_DEAF = """
boss = os.getppid()
def kill_boss(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.kill(boss, signal.SIGKILL)

signal.signal(signal.SIGTERM, kill_boss)
leave_behind(run)
train(run, 3)
for step in (1, 2): (run / f"net-{step}.safetensors").unlink()
save(run, 4, nan=True)
(run / "net-3.safetensors").unlink()
note(run, "sick")
while True: signal.pause()
"""
SCRIPT = f"""
number = start(run)
{ALONE}
if number == 1:
    exec({SICK_AND_DEAF!r})
if number == 2:
    note(run, "orphan")
    signal.pause()
sys.exit(7 if is_there(int(Path(f"{{run}}.left").read_text())) else train(run, 5))
"""


def killed_at(one, step):
    """Supervise once more, and have it killed at a step."""
    command = one.command
    one.command = [command[0], str(KILLED), step, *command[3:]]
    try:
        return once(one)
    finally:
        one.command = command


def once(one):
    """Supervise to whatever end."""
    one.start()
    return one.finish()


def test_killed_at_every_step_it_goes_on_to_the_end(supervising, run):
    """From stopping the sick command to starting it again: the known-good is put back although nothing but its kept
    copy was left, nobody resumes from the sick one, and the orphaned command is ended before the next one starts."""
    one = supervising(SCRIPT, "--max-rollbacks", "3", "--stop-seconds", "0.1")
    one.start(stdin=None, stdout=None)
    assert one.process.wait(PATIENCE) == -signal.SIGKILL
    orphan = run.with_name("run.left")
    assert is_there(int(orphan.read_text()))
    for step in (
        "the incident is open",
        "the quarantine is marked",
        "it is moved",
        "the copy is staged",
        "the known-good is in place",
        "the incident is not closed",
        "the command is about to start",
    ):
        assert killed_at(one, step).code == -signal.SIGKILL, step
        assert not is_there(int(orphan.read_text())), step
        assert starts(run) == ["0"], step
    one.command[1:3] = [str(KILLED), "the command has started"]
    one.start(stdin=None, stdout=None)
    assert one.process.wait(PATIENCE) == -signal.SIGKILL
    until(run.with_name("run.orphan").exists, "the orphan")
    one.command[1:3] = ["-m", "ckptguard"]
    done = once(one)
    assert done.code == 0, done.stderr
    assert "ending what it left running" in done.stderr
    assert starts(run) == ["0", "3", "3"]
    assert newest(run) == 5
    assert not run.with_name("run.two").exists()
    # What two left that were killed between staging and tidying up: a process of another host could be at it, so it
    # goes when it is old.
    staged = list(run.glob("tmp-*"))
    assert len(staged) == 2
    assert all(re.fullmatch(r"tmp-rollback-[0-9a-f]{8}", path.name) for path in staged)
    for path in (inside for top in staged for inside in (*top.rglob("*"), top)):
        os.utime(path, (LONG_AGO, LONG_AGO))
    collect_leftovers(look(open_run(str(run))))
    assert not list(run.glob("tmp-*"))
    assert [p.name for p in run.glob("_ckptguard/quarantine/*/*/*net-*")] == ["held.net-4.safetensors.held"]
    assert {i.state for i in list_incidents(open_run(str(run)))} == {"closed"}
    assert not list(run.parent.glob("ckptguard/supervise-*"))


def test_a_kill_does_not_give_the_budget_back(supervising, run):
    """Whoever starts supervise again and again starts a sick command no more often; after its end said so, anew."""
    one = supervising("start(run)\ntrain(run, 2)\nsave(run, 3, nan=True)\nsignal.pause()\n", "--max-rollbacks", "1")
    assert killed_at(one, "the incident is open").code == -signal.SIGKILL
    done = once(one)
    assert (done.code, starts(run)) == (12, ["0"])
    assert "budget of 1 rollbacks is spent" in done.stderr
    done = once(one)
    assert (done.code, starts(run)) == (12, ["0", "2", "2"]), done.stderr


def test_a_second_supervise_of_the_same_run_is_refused(supervising, run):
    """Two commands would overwrite each other's saves; under whatever spelling of the folder."""
    one = supervising("start(run)\nnote(run, 'ready')\nuntil(Path(f'{run}.go').exists, 'go')\n")
    one.start()
    until(run.with_name("run.ready").exists, "the first")
    other = supervising("start(run)")
    other.command[4] = f"{run.parent}/./{run.name}/"
    done = once(other)
    assert (done.code, starts(run)) == (11, ["0"])
    assert f"(process {one.process.pid})" in done.stderr
    run.with_name("run.go").touch()
    assert one.finish().code == 0


def test_the_note_lasts_until_an_orderly_end(tmp_path):
    """Whoever gets the lock reads what was noted before a kill; another command line has a budget of its own."""
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    first, left = Supervision.begin("/runs/a", ["train", "--lr", "1"], environ)
    assert left is None
    with pytest.raises(BusyError):
        Supervision.begin("/runs/a/", ["train"], environ)
    first.note(restarts=2, series=("net-#",), targets={"net-#": 3}, command=(4, 5))
    first.note(restarts=2, series=("x",), targets={})  # shorter than before
    os.close(first._descriptor)  # as the kernel does
    second, left = Supervision.begin("/runs/a", ["train", "--lr", "1"], environ)
    assert (left.restarts, left.series, left.command, left.mark) == (2, ("x",), (4, 5), first.mark)
    assert second.mark != first.mark
    os.close(second._descriptor)  # killed before it had noted anything
    third, left = Supervision.begin("/runs/a", ["train", "--lr", "2"], environ)
    assert (left.restarts, left.mark) == (0, first.mark)
    third.end()
    for run in ("/runs/a", "/runs/b"):
        anew, left = Supervision.begin(run, ["train"], environ)
        assert left is None
        anew.end()
