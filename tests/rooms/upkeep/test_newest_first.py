"""With a backlog the newest save of each series is read early, and in the end all is as oldest first."""

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
from ckptguard.errors import NoKnownGoodError, StorageError
from ckptguard.layouts import Checkpoint
from ckptguard.records.incidents import list_incidents
from ckptguard.records.kept import list_kept
from ckptguard.records.run import open_run
from ckptguard.reporting.notify import Hooks
from ckptguard.runs import history
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.runs.work import Work
from ckptguard.upkeep import reconcile as reconciling
from ckptguard.upkeep.reconcile import PassNotes, PassResult, reconcile
from ckptguard.values.ids import run_id_of
from ckptguard.values.verdict import Outcome
from ckptguard.verification import checkpoint as verification

State = dict[str, Any]


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
        self.hooks.close(timeout=PATIENCE)

    def is_done(self) -> bool:
        """True if a pass left nothing to do."""
        return bool(self.watched.passes) and not self.watched.last_pass.pending and not self.watched.last_pass.yielded

    def good(self) -> str | None:
        """The path of the known-good checkpoint."""
        return known_good(self.root)

    def outcomes(self) -> dict[str, Outcome | None]:
        """Of each save what it is."""
        return outcomes(self.root)

    def incidents(self) -> list[tuple[str, str]]:
        """What is wrong, as the records have it."""
        found = list_incidents(open_run(str(self.root)))
        return sorted((str(one.evidence.get("path")), one.state) for one in found)

    def told(self) -> list[tuple[object, ...]]:
        """What people were told."""
        return sorted((str(event["event"]), str(event["step"])) for event in self.web.posted)


def known_good(root: Path) -> str | None:
    """The path of the known-good checkpoint."""
    try:
        return os.path.relpath(find_known_good(open_run(str(root))).path, root)
    except NoKnownGoodError:
        return None


def outcomes(root: Path) -> dict[str, Outcome | None]:
    """Of each save what it is, by its records."""
    view = look(str(root))
    verdicts = {c.path: view.history.verdict(view.content_id(c)) for c in view.checkpoints}
    return {path: verdict and verdict.outcome for path, verdict in verdicts.items()}


@pytest.mark.parametrize("seed", range(24))
def test_the_order_of_reading_changes_no_verdict_and_no_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Whatever is wrong with the saves, and whenever the daemon is killed or yields to other runs: in the end all is as
    oldest first. Meanwhile each verdict on record, and what is known-good, is as in the end, too."""
    chance = random.Random(seed)
    Files(tmp_path / "run", seed)
    shutil.copytree(tmp_path / "run", tmp_path / "in-turn", copy_function=shutil.copy2)
    with monkeypatch.context() as patched, listening() as web:
        patched.setattr(reconciling._Pass, "_read_early", lambda self, checkpoint: None)
        wanted = Guarded(tmp_path / "in-turn", web)
        while not wanted.is_done():
            wanted.watched.step(Work(scanner=inline))
        wanted.end()
    expected = wanted.outcomes()
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
            so_far = daemon.outcomes()
            assert so_far == {path: expected[path] if found else None for path, found in so_far.items()}
            good = daemon.good()
            assert good is None or expected[good] is Outcome.GOOD, good
        daemon.end()
        assert daemon.outcomes() == expected
        assert daemon.good() == wanted.good()
        # Where the daemon is killed between a suspect verdict and its incident, no later one opens that.
        bad = {path for path, outcome in expected.items() if outcome is Outcome.BAD}
        assert [i for i in daemon.incidents() if i[0] in bad] == [i for i in wanted.incidents() if i[0] in bad]
        assert set(daemon.incidents()) <= set(wanted.incidents())
        assert daemon.told() == wanted.told()


class Backlog:
    """A run of whole saves that nobody looked at, and passes over it. What was read, judged and read early is noted."""

    def __init__(self, root: Path, saves: int) -> None:
        self.root, self.notes = root, PassNotes()
        self.read: list[str] = []
        self.judged: list[tuple[str, Outcome]] = []
        self.early: list[tuple[str, str]] = []
        self.on_read: Callable[[str], None] = lambda path: None
        root.mkdir()
        for save in range(1, saves + 1):
            self.save(save)

    def save(self, save: int, fault: Callable[[State, int], None] | None = None, *, of: int | None = None) -> None:
        """Save it, as long ago as a trainer that saves each 100 s: what training has at this save, or at another."""
        state, target = state_of(save if of is None else of), self.root / f"net-{save}.pt"
        if fault is not None:
            fault(state, save)
        torch.save(state, target)
        at = time.time() - 100_000.0 + 100.0 * save
        os.utime(target, (at, at))

    def go(self, turns: int = 1000) -> PassResult:
        """Make one pass that may begin so many readings."""
        turn = iter(range(turns))

        def scan(*args: Any) -> Any:
            if not args[2].structure_only:
                self.read.append(args[1][0])
                self.on_read(args[1][0])
            return inline(*args)

        def on_early(checkpoint: Checkpoint, words: str) -> None:
            self.early.append((checkpoint.path, words))

        return reconcile(
            look(str(self.root)),
            self.notes,
            work=Work(
                scanner=scan,
                on_verdict=lambda one: self.judged.append((one.path, one.outcome)),
                on_early=on_early,
                may_begin=lambda _: next(turn, None) is not None,
            ),
        )


def test_the_newest_save_is_read_second_and_each_save_once(tmp_path: Path) -> None:
    """First the series needs a save that is good for certain. What was read early has no verdict until its turn."""
    run = Backlog(tmp_path / "run", 40)
    done = run.go(3)
    assert run.read == ["net-1.pt", "net-40.pt", "net-2.pt"]
    assert [path for path, _ in run.judged] == ["net-1.pt", "net-2.pt"]
    assert [path for path, _ in run.early] == ["net-40.pt"]
    assert "nothing wrong was found" in run.early[0][1]
    assert next(waiting.reason for waiting in done.pending if waiting.path == "net-40.pt") == run.early[0][1]
    assert outcomes(run.root)["net-40.pt"] is None
    assert not run.go().pending
    assert sorted(run.read) == sorted(f"net-{save}.pt" for save in range(1, 41))
    assert run.judged == [(f"net-{save}.pt", Outcome.GOOD) for save in range(1, 41)]
    assert known_good(run.root) == "net-40.pt"


@pytest.mark.parametrize("fault", ["nan", "rot"])
def test_a_newest_save_that_is_bad_by_itself_has_its_verdict_at_once(tmp_path: Path, fault: str) -> None:
    """It is the second verdict, of 40."""
    run = Backlog(tmp_path / "run", 39)
    run.save(40, nan if fault == "nan" else None)
    if fault == "rot":
        torch_file, at = run.root / "net-40.pt", (run.root / "net-40.pt").stat()
        content = bytearray(torch_file.read_bytes())
        content[len(content) // 3] ^= 255
        torch_file.write_bytes(content)
        os.utime(torch_file, ns=(at.st_mtime_ns, at.st_mtime_ns))
    run.go(4)
    assert run.judged[:2] == [("net-1.pt", Outcome.GOOD), ("net-40.pt", Outcome.BAD)]
    assert not run.early
    run.go()
    assert len(run.judged) == len(run.read) == 40
    assert known_good(run.root) == "net-39.pt"


def test_names_that_share_a_step_wait_for_their_turn(tmp_path: Path) -> None:
    """They are ordered as they are sealed."""
    run = Backlog(tmp_path / "run", 4)
    for name, at in (("net-4-best.pt", 1000), ("net-04.pt", 2000)):
        state = state_of(4)
        nan(state, 4)
        torch.save(state, run.root / name)
        os.utime(run.root / name, (at, at))
    run.go()
    assert not run.early
    order = [path for path, _ in run.judged]
    assert order.index("net-4.pt") > order.index("net-04.pt") > order.index("net-3.pt")


@pytest.mark.parametrize("fault", [dead, grown, zeros])
def test_what_only_other_saves_or_checks_show_waits_for_its_turn(
    tmp_path: Path, fault: Callable[[State, int], None]
) -> None:
    """The doubt is said, and no verdict is recorded before the saves in between have theirs."""
    run = Backlog(tmp_path / "run", 9)
    run.save(10, fault)
    run.go(2)
    if fault is not zeros:  # a model of zeros is bad whatever was before
        assert [path for path, _ in run.early] == ["net-10.pt"]
        assert "it may not be good (" in run.early[0][1]
    run.go()
    assert run.judged[-1 if fault is not zeros else 1][0] == "net-10.pt"
    assert len(run.read) == 10
    assert known_good(run.root) == "net-9.pt"


def test_what_changed_since_is_read_again(tmp_path: Path) -> None:
    """What was read early says nothing about other bytes, nor about a list of checksums that came later."""
    run = Backlog(tmp_path / "run", 6)
    run.go(2)
    run.save(6, nan)
    run.go()
    assert run.read.count("net-6.pt") == 2
    assert outcomes(run.root)["net-6.pt"] is Outcome.BAD
    tampered = Backlog(tmp_path / "tampered", 6)
    tampered.go(2)
    file, at = tampered.root / "net-6.pt", (tampered.root / "net-6.pt").stat()
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 255
    with file.open("r+b") as target:
        target.write(content)
    os.utime(file, ns=(at.st_mtime_ns, at.st_mtime_ns))
    tampered.go()
    assert tampered.read.count("net-6.pt") == 2
    assert outcomes(tampered.root)["net-6.pt"] is Outcome.BAD
    other = Backlog(tmp_path / "other", 6)
    other.go(2)
    (other.root / "net-6.pt.sha256").write_text(f"{'0' * 64}  net-6.pt\n")
    other.go()
    assert other.read.count("net-6.pt") == 2
    assert outcomes(other.root)["net-6.pt"] is Outcome.BAD


def test_a_verdict_of_another_process_makes_an_end_of_it(tmp_path: Path) -> None:
    """What was read early is forgotten once the save has its verdict."""
    run = Backlog(tmp_path / "run", 6)
    run.go(2)
    assert run.notes.samples["net-6.pt"].early is not None
    reconcile(look(str(run.root)), PassNotes(), work=Work(scanner=inline))
    run.go()
    assert run.notes.samples["net-6.pt"].early is None
    assert run.judged == [("net-1.pt", Outcome.GOOD)]


def test_a_list_of_checksums_that_comes_while_a_save_is_read_early_counts(tmp_path: Path) -> None:
    """It was not there when the bytes were compared with the lists, so they are read again."""
    run = Backlog(tmp_path / "run", 6)

    def add_list(path: str) -> None:
        if path == "net-6.pt":
            (run.root / "net-6.pt.sha256").write_text(f"{'0' * 64}  net-6.pt\n")

    run.on_read = add_list
    run.go(2)
    assert [path for path, _ in run.early] == ["net-6.pt"]
    run.go()
    assert outcomes(run.root)["net-6.pt"] is Outcome.BAD


def test_the_report_of_what_is_bad_early_is_written_once_the_others_are_judged(tmp_path: Path) -> None:
    """It names the last good save. Meanwhile the commands make it from the records."""
    run = Backlog(tmp_path / "run", 11)
    run.save(12, nan)
    with listening() as web:
        daemon = Guarded(run.root, web)
        turn = iter(range(3))
        daemon.watched.step(Work(scanner=inline, may_begin=lambda _: next(turn, None) is not None))
        assert [path for path, _ in daemon.incidents()] == ["net-12.pt"]
        assert not list(run.root.rglob("incidents/*.txt"))
        while not daemon.is_done():
            daemon.watched.step(Work(scanner=inline))
        daemon.end()
    (report,) = run.root.rglob("incidents/*.txt")
    assert "last good: net-11.pt (step 11)" in report.read_text()


def test_what_is_bad_early_is_compared_with_no_other_save(tmp_path: Path) -> None:
    """Its verdict says what its own bytes show. What would need the save before it is known to the one after it: there
    nothing was trained for the second time in a row."""
    expected = {"net-9.pt": Outcome.GOOD, "net-10.pt": Outcome.BAD, "net-11.pt": Outcome.SUSPECT}
    run = Backlog(tmp_path / "run", 0)
    for save in range(1, 10):
        run.save(save, with_statistics)
    run.save(10, lambda state, save: with_statistics(state, save, sick=True), of=9)
    run.go(4)
    assert run.judged[:2] == [("net-1.pt", Outcome.GOOD), ("net-10.pt", Outcome.BAD)]
    history_now = look(str(run.root)).history
    verdicts = (history_now.verdict(id) for series in history_now.series for id in history_now.sealed(series))
    bad = next(verdict for verdict in verdicts if verdict is not None and verdict.outcome is Outcome.BAD)
    assert {finding.check for finding in bad.findings} == {"finite"}
    run.save(11, with_statistics, of=9)
    run.go()
    run.go()
    assert outcomes(run.root).items() >= expected.items()


def with_statistics(state: State, _: int, *, sick: bool = False) -> None:
    """Add a buffer that changes without an update."""
    state["model"]["norm.running_mean"] = torch.full((12,), float("nan") if sick else 1.0)


def test_a_file_that_changes_while_it_is_found_bad_gets_no_verdict_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even if its size and time stay: what is there now may be good, which only its turn can say."""
    run = Backlog(tmp_path / "run", 6)
    target = run.root / "net-6.pt"
    good, at = target.read_bytes(), target.stat().st_mtime_ns
    run.save(6, nan)
    os.utime(target, ns=(at, at))
    assert target.stat().st_size == len(good)
    is_bad = verification.is_bad_alone

    def write_then_say(evidence: Any) -> bool:
        bad = is_bad(evidence)
        if bad:
            with target.open("r+b") as file:
                file.write(good)
            os.utime(target, ns=(at, at))
        return bad

    monkeypatch.setattr(verification, "is_bad_alone", write_then_say)
    run.go(2)
    assert run.judged == [("net-1.pt", Outcome.GOOD)]
    run.notes.samples["net-6.pt"].retry_at = 0.0
    run.go()
    assert run.judged == [(f"net-{save}.pt", Outcome.GOOD) for save in range(1, 7)]


def test_infinities_that_a_reference_may_have_make_nothing_bad_early(tmp_path: Path) -> None:
    """Ranks have tensors of equal names, and the reference may hold the one of another rank."""
    run = Backlog(tmp_path / "run", 0)
    for save in range(1, 7):
        for rank in range(2):
            target = run.root / f"step-{save}" / f"mp_rank_{rank:02d}_model_states.pt"
            target.parent.mkdir(exist_ok=True)
            last = float("inf") if rank == 0 or save < 6 else 3.0
            made = torch.Generator().manual_seed(10 * save + rank)
            state = {"weight": torch.randn(8, 8, generator=made), "bound": torch.tensor([1.0, 2.0, last])}
            torch.save({"module": state, "global_steps": save}, target)
            os.utime(target, (1000 + save, 1000 + save))
    run.go(2)
    assert [path for path, _ in run.early] == ["step-6"]
    assert [path for path, _ in run.judged] == ["step-1"]


def test_a_read_that_fails_before_its_turn_waits_as_one_in_its_turn(tmp_path: Path) -> None:
    """Reading on a sick disk takes long. The others go on."""
    run = Backlog(tmp_path / "run", 30)
    run.on_read = refuse_net_30
    run.go(2)
    sample = run.notes.samples["net-30.pt"]
    assert (run.read, sample.failures) == (["net-1.pt", "net-30.pt"], 1)
    sample.retry_at = float("inf")
    done = run.go()
    assert run.read.count("net-30.pt") == 1
    assert [(waiting.path, waiting.reason) for waiting in done.pending] == [
        ("net-30.pt", "it could not be read; trying again")
    ]
    assert len(run.judged) == 29


def test_what_waits_for_something_else_than_its_turn_says_so(tmp_path: Path) -> None:
    """What was read early must be read again here, and cannot be."""
    run = Backlog(tmp_path / "run", 30)
    run.go(2)
    (run.root / "net-30.pt").chmod(0o600)
    run.on_read = refuse_net_30
    done = run.go()
    assert [(waiting.path, waiting.reason) for waiting in done.pending] == [("net-30.pt", "the disk says no")]


def refuse_net_30(path: str) -> None:
    """Fail to read one file."""
    if path == "net-30.pt":
        raise StorageError("the disk says no", key=path)


def test_saves_that_are_not_finished_take_no_protection_from_those_before(tmp_path: Path) -> None:
    """The newest finished saves are protected before their verdict, however many unfinished ones come after them."""
    run = Backlog(tmp_path / "run", 4)
    for save in (5, 6):
        run.save(save)
        torn = run.root / f"net-{save}.pt"
        os.truncate(torn, torn.stat().st_size // 2)  # just now
    run.go(0)
    assert sorted(str(id) for id in list_kept(open_run(str(run.root)))) == ["3.1", "4.1"]


def test_an_old_save_that_is_saved_over_before_its_turn_is_counted(tmp_path: Path) -> None:
    """Nobody looked at it before, but nothing had changed it for long."""
    run = Backlog(tmp_path / "run", 6)
    run.go(1)
    run.save(3, of=33)
    assert run.go(1).unverified == ("net-3.pt",)


def test_what_is_held_in_memory_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond it a save is read again in its turn, once."""
    monkeypatch.setattr(verification, "_MOST_HELD", 0)
    run = Backlog(tmp_path / "run", 6)
    run.go()
    assert [path for path, _ in run.early] == ["net-6.pt"]
    assert run.judged == [(f"net-{save}.pt", Outcome.GOOD) for save in range(1, 7)]
    assert run.read.count("net-6.pt") == 2
    assert len(run.read) == 7


def test_a_training_that_saves_fast_does_not_hold_up_its_older_saves(tmp_path: Path) -> None:
    """With a new save before each turn, eight of nine readings are of the backlog, from the second on."""
    run = Backlog(tmp_path / "run", 5)
    for save in range(6, 26):
        run.save(save)
        run.go(1)
    assert [path for path, _ in run.early] == ["net-7.pt", "net-16.pt", "net-25.pt"]
    assert [path for path, _ in run.judged] == [f"net-{save}.pt" for save in range(1, 18)]
    run.go()
    assert run.judged == [(f"net-{save}.pt", Outcome.GOOD) for save in range(1, 26)]
    assert len(run.read) <= 25 + 3


def test_a_backlog_costs_no_look_at_each_file_before_its_first_verdict(tmp_path: Path) -> None:
    """Only the saves that are protected are looked at. All the others are old enough to be judged as they are."""
    run = Backlog(tmp_path / "run", 30)
    looked: list[str] = []

    def scan(*args: Any) -> Any:
        if args[2].structure_only:
            looked.extend(args[1])
        return inline(*args)

    reconcile(look(str(run.root)), run.notes, work=Work(scanner=scan, may_begin=lambda _: False))
    assert sorted(looked) == ["net-29.pt", "net-30.pt"]
