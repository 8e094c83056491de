"""What a store can do, one line each, on a small run in which every one of them has something to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ckptguard.engine.gate import gate
from ckptguard.records.kept import read_kept
from ckptguard.records.run import Run, open_run
from ckptguard.recover.restore import restore
from ckptguard.recover.roll_back import GoBack, roll_back
from ckptguard.repair.repair import repair
from ckptguard.repair.scrub import ScrubListener, scrub
from ckptguard.replicas.replicate import replicate
from ckptguard.retention.pin import pin
from ckptguard.retention.prune import prune
from ckptguard.runs.run_view import select_checkpoint
from ckptguard.runs.work import Work
from ckptguard.upkeep.finish_copies import protect_finished
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.ids import CheckpointId
from ckptguard.values.retention_policy import Policy
from ckptguard.verification.checkpoint import verify_checkpoint
from support.tiny_run import SERIES, TINY, Content, delete, forget, inline, name_of, rot, save
from support.views import look

LAST = Policy(keep_last=2, keep_good=2)
GRACE = 86400.0


@dataclass(frozen=True)
class Stage:
    """A run, a place for another copy of it and one to restore to."""

    url: str
    replica: str
    dest: Path

    def clear(self) -> None:
        """Free what lies in memory."""
        for url in (self.url, self.replica):
            if url.startswith("memory://"):
                forget(url)


def build(url: str, *, pending: bool) -> dict[int, Content]:
    """Steps 100 to 600: 200 is damaged without a copy, 300 is damaged and has a whole copy, 100 and 300 are pinned, the
    others are GOOD, and 500 and 600 have copies. With `pending` there is a finished 700 that nobody looked at."""
    saved = {}
    for step in (100, 200, 300, 400, 500, 600):
        saved[step] = save(url, step, seed=step)
        run = open_run(url)
        if step == 400:
            for damaged in (200, 300):
                rot(url, f"{name_of(damaged)}/model.safetensors")
                verify_checkpoint(
                    look(run, TINY),
                    select_checkpoint(run, look(run).checkpoints, str(damaged)),
                    work=Work(scanner=inline),
                )
        reconcile(look(run, TINY), PassNotes(), work=Work(scanner=inline))
        if step in (100, 300):
            pin(look(run), select_checkpoint(run, look(run).checkpoints, str(step)))
    if pending:
        saved[700] = save(url, 700, seed=700)
    return saved


def _verify(run: Run, stage: Stage) -> None:
    checkpoint = look(run).checkpoint(name_of(700))
    assert checkpoint is not None
    verify_checkpoint(look(run, TINY), checkpoint, work=Work(scanner=inline))


def _check_again(run: Run, stage: Stage) -> None:
    for step in (600, 400, 300):
        checkpoint = look(run).checkpoint(name_of(step))
        assert checkpoint is not None
        verify_checkpoint(look(run, TINY), checkpoint, work=Work(scanner=inline))


def _restore(run: Run, stage: Stage) -> None:
    restore(look(run, TINY), str(stage.dest), work=Work(scanner=inline))


def _roll_back(run: Run, stage: Stage) -> None:
    roll_back(look(run, TINY), GoBack(reason="loss", before_step=600, check_writing=False), work=Work(scanner=inline))


def _put_back(run: Run, stage: Stage) -> None:
    roll_back(look(run, TINY), GoBack(reason="loss", before_step=301, check_writing=False), work=Work(scanner=inline))


def _gate(run: Run, stage: Stage) -> None:
    for _ in range(2):  # the second start goes one further back
        gate(look(run, TINY), attempts=1, work=Work(scanner=inline))


def _own_bytes(run: Run, stage: Stage) -> None:
    auto = TINY.changed(keep="auto")
    reconcile(look(run, auto), PassNotes(), work=Work(scanner=inline))


def _judge_copy(run: Run, stage: Stage) -> None:
    protect_finished(look(run, TINY))
    if read_kept(run, CheckpointId(SERIES, 700, 1)) is None:
        return  # the storage failed: a trainer that goes on is another matter
    if run.storage.root is None:
        delete(stage.url, 700)
    else:  # in one step: a folder that was removed in part is yet another
        Path(stage.url, name_of(700)).rename(Path(stage.url).with_name("gone"))
    reconcile(look(run, TINY), PassNotes(), work=Work(scanner=inline))


def _scrub(run: Run, stage: Stage) -> None:
    scrub(
        look(run, TINY),
        watcher=ScrubListener(lambda c: verify_checkpoint(look(run, TINY), c, work=Work(scanner=inline))),
        work=Work(scanner=inline),
    )


@dataclass(frozen=True)
class Operation:
    """One thing that a store does. `pending`: it needs a save without a verdict; `known`: the steps that may be
    known-good when it is over (a rollback takes an older one where it cannot read); `removes`: those of which nothing
    may be left; `alone`: those whose only bytes are read for the first time, which a storage that lies may spoil."""

    act: Callable[[Run, Stage], object]
    pending: bool = False
    known: tuple[int, ...] = (600,)
    removes: tuple[int, ...] = ()
    alone: tuple[int, ...] = ()


OPERATIONS = {
    "seal": Operation(_verify, pending=True, known=(600, 700)),
    "keep": Operation(lambda run, stage: protect_finished(look(run, TINY)), pending=True, known=(600, 700)),
    "reconcile": Operation(
        lambda run, stage: reconcile(look(run, TINY), PassNotes(), work=Work(scanner=inline)),
        pending=True,
        known=(600, 700),
    ),
    "own bytes": Operation(_own_bytes, pending=True, known=(600, 700)),
    "judge a copy": Operation(_judge_copy, pending=True, known=(600, 700), alone=(700,)),
    "verify": Operation(_check_again),
    "prune": Operation(lambda run, stage: prune(look(run), LAST, grace=GRACE)),
    "prune for good": Operation(lambda run, stage: prune(look(run), LAST, grace=-1.0), removes=(400,)),
    "restore": Operation(_restore),
    "roll back": Operation(_roll_back, known=(600, 500, 400, 300, 100)),
    "gate": Operation(_gate, known=(600, 500, 400, 300, 100)),
    "scrub": Operation(_scrub),
    "repair": Operation(lambda run, stage: repair(look(run, TINY), work=Work(scanner=inline))),
    "replicate": Operation(lambda run, stage: replicate(look(run, TINY), stage.replica, work=Work(scanner=inline))),
    "put back": Operation(_put_back, known=(600, 500, 400, 300, 100)),
}
