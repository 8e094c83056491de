"""What becomes of a save behind training when its process ends, or is killed."""

import signal
import subprocess

import pytest
import torch
from support.forked import TESTS, Forked
from support.guards import guard_of

SCRIPT = """
import os, sys, threading
import torch
from support.guards import guard_of
from ckptguard.training.saving import destinations, own_layout, saving
model = torch.nn.Linear(1000, 1000)
guard = guard_of({run!r}, model)
with torch.no_grad():
    model.weight.fill_(1)
guard.save(step=1)
with torch.no_grad():
    model.weight.fill_(2)
{before}
guard.save(step=2, blocking=False)
with torch.no_grad():
    model.weight.fill_(3)
os.write(1, b"called\\n")  # print would mix the lines of two threads
{after}
"""
STUCK = """
module = own_layout if "{name}".startswith("write") else destinations
real, stuck = module.{name}, threading.Event()
def never(*args, **options):
    os.write(1, b"stuck\\n")
    stuck.wait()
module.{name} = never
"""


def script(tmp_path, before="", after=""):
    """A training in a process of its own: two saves, the second one behind it."""
    text = SCRIPT.format(run=str(tmp_path / "run"), before=before, after=after)
    return Forked(text, path=(TESTS,), piped=True)


def resumed(tmp_path):
    """(step, weight) that a new process would go on with."""
    model = torch.nn.Linear(1000, 1000)
    step = guard_of(tmp_path / "run", model).resume()
    return step, model.weight.unique().tolist()


@pytest.mark.parametrize("after", ["", "sys.exit(3)", "raise ZeroDivisionError", "del guard"])
def test_the_end_of_the_interpreter_waits_for_the_save(tmp_path, after):
    """However the script ends, what was in flight is sealed, whole."""
    process = script(tmp_path, after=after)
    _, trouble = process.communicate(timeout=250)
    assert "Traceback" not in trouble.replace('Traceback (most recent call last):\n  File "<string>"', "")
    assert resumed(tmp_path) == (2, [2.0])


def test_the_end_of_the_interpreter_does_not_wait_for_ever(tmp_path):
    """A save that is stuck is given up, said so, and does not count."""
    before = STUCK.format(name="write_tensors") + "saving.EXIT_SECONDS = 0.2"
    process = script(tmp_path, before=before)
    _, trouble = process.communicate(timeout=250)
    assert process.returncode == 0
    assert "step 2 was not finished" in trouble
    assert resumed(tmp_path) == (1, [1.0])


@pytest.mark.parametrize("name", ["write_tensors", "write_state", "make_room", "seal_written"])
def test_killed_in_flight(tmp_path, name):
    """kill -9 at any point of a save in flight: it is never good, and the one before it is."""
    process = script(tmp_path, before=STUCK.format(name=name), after="threading.Event().wait()")
    while process.stdout.readline().strip() != "stuck":
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=250)
    assert resumed(tmp_path) == (1, [1.0])


def test_killed_at_random_times_in_flight(tmp_path):
    """Whatever a kill leaves, what is resumed is one of the two states that were saved, whole."""
    for number in range(4):
        folder = tmp_path / str(number)
        folder.mkdir()
        process = script(folder, after="threading.Event().wait()")
        while process.stdout.readline().strip() != "called":
            assert process.poll() is None
        try:
            process.wait(0.004 * number)
        except subprocess.TimeoutExpired:
            process.kill()
        process.communicate(timeout=250)
        assert resumed(folder) in [(1, [1.0]), (2, [2.0])]
