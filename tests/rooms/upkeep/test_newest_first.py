"""With much to verify the newest saves come first, and in the end all is as if they had come in their turn."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.daemon_process import PATIENCE
from support.runs import QUICK
from support.tiny_run import inline
from support.views import look
from support.web_listener import Listener, listening

from ckptguard.engine.watched_run import WatchedRun
from ckptguard.errors import NoKnownGoodError
from ckptguard.inspect.list_states import survey
from ckptguard.records.incidents import list_incidents
from ckptguard.records.run import open_run
from ckptguard.reporting.notify import Hooks
from ckptguard.runs import history
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.runs.work import Work
from ckptguard.upkeep import reconcile as reconciling
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.ids import run_id_of
from ckptguard.values.verdict import Outcome, Severity, is_early

State = dict[str, Any]
HEAVY = (Severity.ERROR, Severity.SICKNESS)


class Killed(BaseException):
    """The process is gone."""


def state_of(save: int) -> State:
    """What training has at a save."""
    made = torch.Generator().manual_seed(save)
    names = [f"layers.{n}.weight" for n in range(5)]
    model = {name: torch.randn(12, 12, generator=made) for name in names}
    moments = {n: {"step": torch.tensor(float(save)), "exp_avg": torch.randn(12, 12, generator=made)} for n in range(5)}
    groups = [{"lr": 0.1, "params": list(range(5))}]
    return {"model": model, "optimizer": {"state": moments, "param_groups": groups}, "step": save}


def nan(state: State, _: int) -> None:
    state["model"]["layers.1.weight"][3, 3] = float("nan")


def zeros(state: State, _: int) -> None:
    for weight in state["model"].values():
        weight.zero_()


def dead(state: State, _: int) -> None:
    for weight in state["model"].values():
        weight.fill_(0.25)


def grown(state: State, _: int) -> None:
    state["model"]["head.weight"] = torch.ones(4, 4) / 3


def stale(state: State, save: int) -> None:
    before = state_of(save)
    state["model"], state["optimizer"]["state"] = before["model"], before["optimizer"]["state"]


class Files:
    """A run that was there before anybody looked at it: some saves, and what is wrong with them."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root, chance = root, random.Random(seed)
        self.saves, folders = chance.randint(8, 26), chance.random() < 0.4
        faults: list[Callable[[State, int], None] | None] = [None] * (self.saves + 1)
        for _ in range(chance.randint(0, 5)):
            at = chance.randint(1, self.saves)
            lasting, fault = chance.choice(((1, nan), (1, zeros), (99, dead), (99, grown), (1, zeros), (2, stale)))
            for save in range(at, min(at + lasting, self.saves + 1)):
                faults[save] = partial(fault) if fault is not stale else lambda s, _, at=at: stale(s, at - 1)
        for save in range(1, self.saves + 1):
            state = state_of(save)
            if (fault := faults[save]) is not None:
                fault(state, save)
            parts = {"model.pt": {"model": state["model"]}, "optimizer.pt": state["optimizer"]}
            if folders and chance.random() < 0.1:
                parts["optimizer.pt"] = state_of(max(1, save - chance.randint(1, 4)))["optimizer"]
            whole = root / f"net-{save}.pt"
            for place, part in {whole.parent / f"step-{save}" / n: p for n, p in parts.items()}.items():
                target, content = (place, part) if folders else (whole, state)
                target.parent.mkdir(parents=True, exist_ok=True)
                torch.save(content, target)
                if chance.random() < 0.04:
                    os.truncate(target, target.stat().st_size // 2)
                at = time.time() - 10_000.0 - 100.0 * (self.saves - save)
                os.utime(target, (at, at))


class Guarded:
    """The run as a daemon guards it, that may be killed and started again. What it sends goes to a listener."""

    def __init__(self, root: Path, web: Listener) -> None:
        self.root, self.web, self.settings = root, web, QUICK.changed(webhook=web.url, keep="none")
        self.start()

    def start(self) -> None:
        """A new process."""
        self.hooks = Hooks(self.settings, lambda event, **fields: None)
        self.watched = WatchedRun(str(self.root), run_id_of(str(self.root)), self.settings, self.hooks, None)

    def end(self) -> None:
        """The end of the process. What was queued is sent."""
        self.hooks.close(patience=PATIENCE)

    def is_done(self) -> bool:
        """True if a pass left nothing to do."""
        return bool(self.watched.passes) and not self.watched.last_pass.pending and not self.watched.last_pass.yielded

    def good(self) -> str | None:
        """The path of the known-good checkpoint."""
        try:
            return os.path.relpath(find_known_good(open_run(str(self.root))).path, self.root)
        except NoKnownGoodError:
            return None

    def verdicts(self) -> dict[str, tuple[Outcome, frozenset[tuple[str, str, str | None]]]]:
        """Of each save what it is, and why."""
        view = look(str(self.root))
        found = {}
        for one in survey(view):
            verdict = view.history.verdict(one.id) if one.id is not None else None
            assert not is_early(verdict)
            heavy = [f for f in (verdict.findings if verdict else ()) if f.severity in HEAVY]
            why = frozenset((f.check, f.message, f.tensor) for f in heavy)
            found[one.path] = one.outcome, why
        return found

    def incidents(self) -> list[tuple[str, str, str]]:
        """What is wrong, as the records have it."""
        found = list_incidents(open_run(str(self.root)))
        return sorted((str(one.evidence.get("path")), one.cause, one.state) for one in found)

    def told(self) -> list[tuple[object, ...]]:
        """What people were told."""
        return sorted((event["event"], event["step"], event["cause"], event["reason"]) for event in self.web.posted)


@pytest.mark.parametrize("seed", range(24))
def test_the_order_changes_no_verdict_and_no_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Whatever is wrong with the saves, and whenever the daemon is killed or yields to other runs: in the end all
    is as oldest first. Nothing is known-good meanwhile that is not good then."""
    chance = random.Random(seed)
    Files(tmp_path / "run", seed)
    shutil.copytree(tmp_path / "run", tmp_path / "in-turn", copy_function=shutil.copy2)
    with monkeypatch.context() as patched, listening() as web:
        patched.setattr(reconciling, "_NEWEST", 1000)
        patched.setattr(reconciling, "_NEWEST_OF_PARTS", 1000)
        wanted = Guarded(tmp_path / "in-turn", web)
        while not wanted.is_done():
            wanted.watched.step(Work(scanner=inline))
        wanted.end()
    expected = wanted.verdicts()
    append = history.append_verdict

    def dies(*args: Any, **named: Any) -> Any:
        if chance.random() < 0.04:
            raise Killed
        done = append(*args, **named)
        if chance.random() < 0.04:
            raise Killed
        return done

    def scan(*args: Any) -> Any:
        if chance.random() < 0.03:
            raise Killed
        return inline(*args)

    monkeypatch.setattr(history, "append_verdict", dies)
    with listening() as web:
        daemon = Guarded(tmp_path / "run", web)
        while not daemon.is_done():
            turn = iter(range(chance.choice((1, 3, 1000))))
            try:
                daemon.watched.step(Work(scanner=scan, may_begin=lambda _, turn=turn: next(turn, None) is not None))
            except Killed:
                daemon.end()
                daemon.start()
            good = daemon.good()
            assert good is None or expected[good][0] is Outcome.GOOD, good
        daemon.end()
        assert daemon.verdicts() == expected
        assert daemon.good() == wanted.good()
        # Where the daemon is killed between a suspect verdict and its incident, no later one opens that.
        bad = {path for path, (outcome, _) in expected.items() if outcome is Outcome.BAD}
        assert [i for i in daemon.incidents() if i[0] in bad] == [i for i in wanted.incidents() if i[0] in bad]
        assert set(daemon.incidents()) <= set(wanted.incidents())
        assert daemon.told() == wanted.told()


def test_the_newest_save_is_known_good_after_four_readings(tmp_path: Path) -> None:
    """Of a backlog of any length: one to compare with, and three. In the end each of these three was read twice."""
    root = tmp_path / "run"
    for save in range(1, 41):
        root.mkdir(exist_ok=True)
        torch.save(state_of(save), root / f"net-{save}.pt")
    read: list[str] = []
    answers: list[str] = []

    def scan(*args: Any) -> Any:
        if not args[2].structure_only:
            read.append(args[1][0])
        return inline(*args)

    def found(_: object) -> None:
        answers.append(os.path.basename(find_known_good(open_run(str(root))).path))

    done = reconcile(look(str(root)), PassNotes(), work=Work(scanner=scan, found=found))
    assert answers[:4] == ["net-1.pt", "net-38.pt", "net-39.pt", "net-40.pt"]
    assert set(answers[3:]) == {"net-40.pt"}
    assert len(read) == 43
    assert not done.pending
