"""Real verifications on the workers of a Dask cluster that die, and a scheduler that is killed.

CKPTGUARD_CAMPAIGN=full: 200 checkpoints on four workers. The short form has 30 on two.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from servers.processes import free_port, listens, running
from support.fleets import bad_in, counts, ledger_of, make_fleet, step_of
from support.tiny_run import name_of

pytest.importorskip("distributed", reason="Dask is missing: pip install 'ckptguard[dask]'")

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(900)]
FULL = os.environ.get("CKPTGUARD_CAMPAIGN") == "full"
RUNS, SAVES, WORKERS = (20, 10, 4) if FULL else (6, 5, 2)
TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture
def environment(tmp_path):
    """Of all processes here: workers that may die, quick saves, and a scheduler that blames a task for one death."""
    (tmp_path / "notes").mkdir()
    found = {k: v for k, v in os.environ.items() if not k.startswith(("CKPTGUARD_", "DASK_", "DYING_"))}
    path = os.pathsep.join((str(TESTS), os.environ.get("PYTHONPATH", "")))
    return {
        **found,
        "CKPTGUARD_SETTLE": "0",
        "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "0",
        "DYING_NOTES": str(tmp_path / "notes"),
        "PYTHONPATH": path,
    }


@contextlib.contextmanager
def cluster(tmp_path: Path, environment: dict[str, str], workers: int) -> Iterator[tuple[str, Path]]:
    """A scheduler and its workers, in processes: yields the engine, and the file with the scheduler's process id."""
    port, options = free_port(), {"env": environment, "cwd": tmp_path}
    dask, place = [sys.executable, "-m"], f"tcp://127.0.0.1:{port}"
    scheduler = [*dask, "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", str(port), "--no-dashboard"]
    several = ["--nworkers", str(workers), "--nthreads", "1", "--preload", "support.dying_workers", "--no-dashboard"]
    pid = tmp_path / "scheduler.pid"
    with running([*scheduler, "--pid-file", str(pid)], tmp_path / "scheduler.log", lambda: listens(port), **options):
        worker = [*dask, "distributed.cli.dask_worker", place, *several]
        with running(worker, tmp_path / "worker.log", lambda: True, **options):
            yield f"dask://127.0.0.1:{port}", pid


def fleet(*arguments: object, environment: dict[str, str]) -> subprocess.Popen[str]:
    """The command, begun."""
    command = [sys.executable, "-m", "ckptguard", "fleet", *map(str, arguments), "--json"]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end_of(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Its exit code and output."""
    out, errors = process.communicate(timeout=600)
    assert "Traceback" not in errors
    return process.returncode, out, errors


def test_each_checkpoint_is_recorded_once_whatever_workers_do(tmp_path, environment):
    """One worker is killed in the middle, one task kills each worker that takes it. All others have one verdict, and
    what is damaged is found; the second call does only the rest."""
    sick = {(1, 2), (3, 4), (RUNS - 1, 0)}
    root = make_fleet(tmp_path / "fleet", RUNS, SAVES, sick=sick)
    poison, once = f"run2/{name_of(step_of(1))}", f"run4/{name_of(step_of(SAVES // 2))}"
    environment |= {"DYING_ALWAYS": poison, "DYING_ONCE": once}
    total = RUNS * SAVES
    with cluster(tmp_path, environment, WORKERS) as (engine, _):
        code, text, _ = end_of(fleet("verify", root, "--engine", engine, environment=environment))
        done = json.loads(text)
        assert (code, done["left"]) == (3, 0)
        assert counts(done) == {"good": total - len(sick) - 1, "bad": len(sick), "pending": 1}
        assert [f"{Path(o['run']).name}/{o['path']}" for o in done["wrong"] if o["outcome"] == "pending"] == [poison]
        assert bad_in(text) == {(f"run{run}", name_of(step_of(save))) for run, save in sick}
        entries = ledger_of(root)
        assert len(entries) == total - 1
        assert (tmp_path / "notes/once").exists()
        assert len(list((tmp_path / "notes").glob("died-*"))) >= 2
    code, text, _ = end_of(fleet("verify", root, environment=environment))
    assert (code, json.loads(text)["done"]) == (3, 1)
    after = ledger_of(root)
    assert len(after) == total
    assert set(entries) <= set(after)


@pytest.mark.parametrize("own", [False, True], ids=["address", "factory"])
def test_a_killed_scheduler_ends_the_job_and_the_next_call_does_the_rest(tmp_path, environment, own):
    """With one sentence, exit code 1, and nothing called bad."""
    root = make_fleet(tmp_path / "fleet", 3, 4)
    environment |= {"DYING_GATE": f"run1/{name_of(step_of(2))}"}
    reached = tmp_path / "notes/reached"
    os.mkfifo(reached)
    with cluster(tmp_path, environment, 2) as (engine, pid):
        if own:
            environment["DYING_SCHEDULER"] = engine.replace("dask:", "tcp:")
            engine = "support.dying_workers:dask"
        job = fleet("verify", root, "--engine", engine, environment=environment)
        assert reached.read_text() == "here"  # waits until the task is under way
        os.kill(int(pid.read_text()), signal.SIGKILL)
        code, text, errors = end_of(job)
    done = json.loads(text)
    assert code == 1
    assert "the Dask scheduler " in errors
    assert "cannot be reached" in errors
    assert "bad" not in counts(done)
    assert done["left"] >= 2
    recorded = len(ledger_of(root))
    assert recorded >= 12 - done["left"]
    code, text, _ = end_of(fleet("verify", root, environment=environment))
    assert (code, json.loads(text)["done"]) == (0, 12 - recorded)
    assert len(ledger_of(root)) == 12


@pytest.mark.parametrize("view", ["missing", "empty", "copy"])
def test_a_worker_that_sees_other_storage_costs_nothing(tmp_path, environment, view):
    """Three of four see the runs. Each checkpoint has its verdict, and the fourth worker is named, if Dask
    asked it at all."""
    root, other = make_fleet(tmp_path / "fleet", 3, 67 if FULL else 7, sick=[(1, 2)]), tmp_path / "other"
    total = 201 if FULL else 21
    if view == "empty":
        other.mkdir()
    elif view == "copy":
        shutil.copytree(root, other)
    environment |= {"BLIND_FROM": str(root), "BLIND_TO": str(other)}
    asked = tmp_path / "notes/asked"
    environment["BLIND_ASKED"] = str(asked)
    with cluster(tmp_path, environment, 3) as (engine, _):
        worker = [
            sys.executable,
            "-m",
            "distributed.cli.dask_worker",
            engine.replace("dask:", "tcp:"),
            "--no-dashboard",
        ]
        blind = [*worker, "--nthreads", "1", "--preload", "support.blind_workers"]
        with running(blind, tmp_path / "blind.log", lambda: True, env=environment, cwd=tmp_path):
            wait_for_workers(engine, 4)
            code, text, errors = end_of(fleet("verify", root, "--engine", engine, environment=environment))
    done = json.loads(text)
    assert (code, counts(done), done["left"], done["gone"]) == (3, {"good": total - 1, "bad": 1}, 0, 0)
    assert (len(ledger_of(root)), ledger_of(other)) == (total, [])
    assert len(done["put_aside"]) == asked.exists()
    assert all(f"warning: {worker}" in errors for worker in done["put_aside"])


def wait_for_workers(engine: str, count: int) -> None:
    """Return once so many workers are there."""
    from distributed import Client

    connect: Any = Client
    with connect(engine.replace("dask:", "tcp:"), set_as_default=False) as client:
        client.wait_for_workers(count, timeout=60)
