"""The machine of `trainer_machine.py`: a short run here; the long one is spread over processes, for each setting of
`keep`, on a file system without reflinks and on one with them, and in memory."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import time

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from support.trainer_machine import TrainerMachine

FULL = os.environ.get("CKPTGUARD_CAMPAIGN") == "full"
SEQUENCES, ACTIONS = 2000, 60
EACH = 10  # sequences of one seed
KEEP, PLACES = ("auto", "link", "copy"), ("local", "memory")


def play(number: int, sequences: int, actions: int, *, keep: str, place: str) -> None:
    """Some sequences, other ones for every number. `place`: "local", "memory", or a folder."""
    words = {"keep": keep, "memory": place == "memory"}
    if place not in PLACES:
        words["scratch"] = place
    wanted = settings(
        max_examples=sequences,
        stateful_step_count=actions,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
        print_blob=False,
        report_multiple_bugs=False,
    )
    run_state_machine_as_test(seed(number)(type("Machine", (TrainerMachine,), words)), settings=wanted)


def play_some(words: tuple[int, str, str]) -> int:
    """So many sequences of the long run; how many they were."""
    number, keep, place = words
    play(number, EACH, ACTIONS, keep=keep, place=place)
    return EACH


def play_all(keep: str, place: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The long run of one setting in one place."""
    workers, begun, played = max(os.cpu_count() or 1, 2), time.monotonic(), 0
    parts = [(number, keep, place) for number in range(1, SEQUENCES // EACH + 1)]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for some in pool.imap_unordered(play_some, parts):  # a violation is told at once
            played += some
            with capsys.disabled():
                took = time.monotonic() - begun
                print(f"\r{keep}, {place}: {played} sequences of {ACTIONS} actions in {took:.0f} s", end="", flush=True)
    assert played == SEQUENCES


@pytest.mark.campaign
@pytest.mark.timeout(14400 if FULL else 300)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("keep", KEEP)
def test_whatever_a_trainer_does_the_promises_are_kept(keep, place, capsys):
    """Nothing bad is called good, there is always a good one, and what was gone back to can be resumed from."""
    if FULL:
        play_all(keep, place, capsys)
    else:
        play(1, 2, 20, keep=keep, place=place)


@pytest.fixture
def reflinks(tmp_path):
    """A folder on a file system of its own that makes reflinks, where one can be mounted."""
    image, folder = tmp_path / "xfs.img", tmp_path / "xfs"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(512 << 20)
    try:
        for command in (["mkfs.xfs", "-q", "-m", "reflink=1", image], ["mount", "-o", "loop", image, folder]):
            subprocess.run([str(word) for word in command], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no XFS can be mounted here: {getattr(error, 'stderr', b'') or error!r}")
    yield str(folder)
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.campaign
@pytest.mark.timeout(14400 if FULL else 300)
@pytest.mark.parametrize("keep", KEEP)
def test_they_are_kept_where_there_are_reflinks(keep, reflinks, capsys):
    """The same on XFS, where this machine lets it be mounted."""
    if FULL:
        play_all(keep, reflinks, capsys)
    else:
        play(2, 1, 20, keep=keep, place=reflinks)
