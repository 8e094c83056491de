"""Supervises of one job, one on each node, as process groups with homes of their own: they stop, go back and start as
one."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from supervised_training import until

from ckptguard.records.incidents import list_incidents
from ckptguard.records.run import open_run
from ckptguard.supervise.nodes import group_of

NODES = 3
NODE = """
rank = int(os.environ["RANK"])
me = Path(f"{run}.rank{rank}")
with me.open("a") as file:
    file.write(f"{newest(run)}{' sick' if is_sick(run, newest(run)) else ''}\\n")
number = len(me.read_text().splitlines())
"""
SICK = """
if rank == 0 and number == 1:
    train(run, 3)
    save(run, 4, nan=True)
if number == 1:
    signal.pause()
if rank == 0:
    train(run, 5)
    note(run, "done")
until(Path(f"{run}.done").exists, "the end of training")
"""
DIES = """
if rank == 0:
    train(run, 2 * number)
if number == 1 and rank == 2:
    await_verdict(run, 2)
    sys.exit(7)
if number == 1:
    signal.pause()
"""
WAITS = """
run.mkdir(exist_ok=True)
note(run, f"ready{rank}")
signal.pause()
"""


@pytest.fixture
def on_nodes(supervising, tmp_path, run):
    """Start supervise on each node. Each sees its own run if `shared` is False."""

    def begin(text, *options, shared=True):
        made = []
        for rank in range(NODES):
            home = tmp_path / f"node{rank}"
            home.mkdir()
            one = supervising(NODE + text, *options, folder=home, run=run if shared else home / "run")
            one.environment |= {
                "HOME": str(home),
                "RANK": str(rank),
                "WORLD_SIZE": str(NODES),
                "TORCHELASTIC_RUN_ID": "job",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "29500",
            }
            one.start()
            made.append(one)
        return made

    return begin


def starts_of(run: Path) -> list[list[str]]:
    """From what each start on each node could resume."""
    return [Path(f"{run}.rank{rank}").read_text().splitlines() for rank in range(NODES)]


@pytest.mark.parametrize(("text", "back"), [(SICK, "3"), (DIES, "2")], ids=["sick", "a node dies"])
def test_all_stop_and_start_as_one_and_one_goes_back(on_nodes, run, text, back):
    """Whichever node has the trouble: there is one incident, and no node starts from what is sick."""
    ends = [one.finish() for one in on_nodes(text)]
    assert [end.code for end in ends] == [0] * NODES, ends
    starts = starts_of(run)
    assert starts[0] == ["0", back], ends
    assert [len(own) for own in starts] == [2] * NODES, ends
    assert "sick" not in str(starts)
    assert len(list_incidents(open_run(str(run)))) == 1
    assert sum("back to net-" in end.stderr for end in ends) == 1, ends
    assert not list((run / "_ckptguard" / "nodes").rglob("*.json")), "the session left something"


@pytest.mark.parametrize("lost", ["leader", "another"])
def test_a_node_that_is_lost_is_named_and_ends_all(on_nodes, run, lost):
    """Its processes are gone at once, as after a failure of power; the others stop, and say which node it was."""
    made = on_nodes(WAITS)
    until(lambda: all(Path(f"{run}.ready{rank}").exists() for rank in range(NODES)), "the training")
    leader = json.loads((run / "_ckptguard" / "nodes" / "leader.json").read_text())["owner"]["pid"]
    [rank] = [n for n in range(NODES) if (made[n].process.pid == leader) == (lost == "leader")][:1]
    os.killpg(made[rank].process.pid, signal.SIGKILL)
    ends = [one.finish() for one in made]
    del ends[rank]
    assert [end.code for end in ends] == [1] * (NODES - 1), ends
    assert any(f"(rank {rank}) was lost" in end.stderr for end in ends), ends


def test_one_node_that_is_asked_to_end_ends_all(on_nodes, run):
    """A scheduler may tell only one of them. Nothing is started again."""
    made = on_nodes(WAITS)
    until(lambda: all(Path(f"{run}.ready{rank}").exists() for rank in range(NODES)), "the training")
    made[1].process.terminate()
    ends = [one.finish() for one in made]
    assert [end.code for end in ends] == [143] * NODES, ends
    assert {len(starts) for starts in starts_of(run)} == {1}


def test_without_shared_storage_it_says_so_and_starts_nothing(on_nodes, tmp_path):
    """Each node sees only itself."""
    ends = [one.finish() for one in on_nodes(WAITS, "--nodes-seconds", "2", shared=False)]
    assert [end.code for end in ends] == [2] * NODES, ends
    for rank, end in enumerate(ends):
        missing = ", ".join(str(n) for n in range(NODES) if n != rank)
        assert f"of {NODES} supervises of this job, 1 were seen" in end.stderr
        assert f"missing: rank {missing}" in end.stderr
        assert "--alone" in end.stderr
    assert not list(tmp_path.rglob("run.rank*"))


@pytest.mark.parametrize(
    ("environ", "group"),
    [
        ({}, None),
        ({"RANK": "1", "WORLD_SIZE": "1", "MASTER_PORT": "1"}, None),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, (1, 2)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, None),
        ({"RANK": "x", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, None),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, None),
        ({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_ID": "0"}, (3, 4)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, None),  # the batch script itself
    ],
)
def test_srun_and_torchrun_say_who_belongs_together(environ, group):
    """Nothing else makes several supervises one."""
    found = group_of(environ)
    assert (found and (found.rank, found.size)) == group
