"""Questions to storages: a run that hangs holds up no question about another, and what waits is bounded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ckptguard_daemon import jobs as jobs_module
from ckptguard_daemon import run_routes
from ckptguard_daemon.application import application, routes
from ckptguard_daemon.http.routes import OWNER
from ckptguard_daemon.jobs import StorageThreads
from support.served_runs import answer_of, served, watched
from support.tiny_run import TINY, save

from ckptguard.errors import BusyError

MOST, OF_RUN = 4, 2
PATIENCE = 60


class Hanging:
    """Work that goes on until it is released, or at once for a run that does not hang. It counts what is at work."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.begun: list[str] = []

    def ask(self, turns: StorageThreads, run: str) -> asyncio.Task[str]:
        """Ask a question about a run."""

        def work() -> str:
            self.begun.append(run)
            assert not run.startswith("hangs") or self.release.wait(PATIENCE)
            return run

        return asyncio.create_task(turns.do(run, work))


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    """Nothing hangs after the test."""
    made = Hanging()
    yield made
    made.release.set()


def test_a_run_that_hangs_holds_up_no_other(hanging: Hanging) -> None:
    """Many ask about it, and others about another run: these are answered."""

    async def ask() -> list[str]:
        turns = StorageThreads(most=MOST, of_run=OF_RUN)
        stuck = [hanging.ask(turns, "hangs") for _ in range(7)]
        found = [await asyncio.wait_for(hanging.ask(turns, "well"), PATIENCE) for _ in range(2)]
        assert hanging.begun.count("well") == 2
        assert hanging.begun.count("hangs") <= OF_RUN
        hanging.release.set()
        assert await asyncio.gather(*stuck) == ["hangs"] * 7
        return found

    assert asyncio.run(ask()) == ["well", "well"]


def test_what_waits_is_bounded(hanging: Hanging, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond that a question is refused at once. About another run it is answered."""
    monkeypatch.setattr(jobs_module, "_MOST_WAITING", 5)

    async def ask() -> None:
        turns = StorageThreads(most=MOST, of_run=OF_RUN)
        stuck = [hanging.ask(turns, "hangs") for _ in range(OF_RUN + 6)]
        done, waiting = await asyncio.wait(stuck, timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
        assert [type(one.exception()) for one in done] == [BusyError]
        assert len(waiting) == OF_RUN + 5
        assert await asyncio.wait_for(hanging.ask(turns, "well"), PATIENCE) == "well"
        hanging.release.set()
        await asyncio.gather(*waiting)

    asyncio.run(ask())


def test_who_goes_leaves_its_turn(hanging: Hanging) -> None:
    """A question that is given up while it waits, or just when its turn came, costs no turn."""

    async def ask() -> None:
        turns = StorageThreads(most=MOST, of_run=OF_RUN)
        stuck = [hanging.ask(turns, "hangs") for _ in range(6)]
        while len(hanging.begun) < OF_RUN:
            await asyncio.sleep(0)
        stuck[3].cancel()
        hanging.release.set()
        await stuck[0]
        for one in stuck[4:]:
            one.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)
        hanging.release.clear()
        stuck = [hanging.ask(turns, f"hangs {n}") for n in range(MOST)]
        at_work = len(hanging.begun)
        while len(hanging.begun) < at_work + MOST:
            await asyncio.sleep(0)
        hanging.release.set()
        await asyncio.gather(*stuck)

    asyncio.run(asyncio.wait_for(ask(), PATIENCE))


def test_pages_are_answered_while_a_storage_hangs(
    tmp_path: Path, hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many ask a storage that does not answer: what the catalogue knows is answered."""
    save(str(tmp_path), 1, 1)
    run = watched(tmp_path, TINY)
    asked = application(routes(served([run])), lambda *_: None)
    begun = threading.Semaphore(0)

    def survey(*_: Any) -> list[Any]:
        begun.release()
        assert hanging.release.wait(PATIENCE)
        return []

    monkeypatch.setattr(run_routes, "survey", survey)

    async def ask(path: str) -> int:
        return (await answer_of(asked, path, caller=OWNER)).status

    async def ask_all() -> None:
        stuck = [asyncio.create_task(ask(f"/v1/runs/{run.run_id}/checkpoints")) for _ in range(100)]
        await asyncio.to_thread(begun.acquire, timeout=PATIENCE)
        for path in ("/v1/fleet", f"/v1/runs/{run.run_id}/page"):
            assert await asyncio.wait_for(ask(path), PATIENCE) == 200
        hanging.release.set()
        assert set(await asyncio.gather(*stuck)) == {200}

    asyncio.run(ask_all())
