"""What several ranks do in the tests of their saves behind training. Run by `rank_processes`."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import threading
from unittest import mock

import torch
import torch.distributed as dist
from sharded_training import die, digest, make, train
from torch.distributed.checkpoint.filesystem import FileSystemReader

import ckptguard
from ckptguard.errors import CkptguardError
from ckptguard.training.content import host_copy
from ckptguard.training.saving import destinations
from ckptguard.training.sharded import dcp_plan
from ckptguard.values.settings import Settings


def on_rank(rank, place, name, other):
    """Another function in place of one, on one rank only, until the end of the block."""
    return mock.patch.object(place, name, other) if dist.get_rank() == rank else contextlib.nullcontext()


class Held(contextlib.ExitStack):
    """One rank stops before a function until it is let go."""

    def __init__(self, rank, place=dcp_plan._HashingStream, name="write"):
        super().__init__()
        self.let_go, self.reached, self.here = threading.Event(), threading.Event(), dist.get_rank() == rank
        real = getattr(place, name)

        def wait_first(*args, **options):
            self.reached.set()
            assert self.let_go.wait(60)
            return real(*args, **options)

        self.enter_context(on_rank(rank, place, name, wait_first))

    def wait(self):
        """Return on every rank once the one that stops has stopped."""
        if self.here:
            assert self.reached.wait(60)
        dist.barrier()


class Training:
    """A guarded training on this rank."""

    def __init__(self, folder, kind="fsdp2", *, saving=ckptguard.Saving(), deadline=30.0):  # noqa: B008
        self.model, self.optimizer, self.scheduler = make(kind)
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        deadlines = ckptguard.Deadlines(daemon=deadline, ranks=40)
        self.guard = ckptguard.TrainingGuard(
            folder,
            **parts,
            daemon="off",
            settings=Settings(settle=0),
            policy=ckptguard.RollbackPolicy(check_every=1000),
            deadlines=deadlines,
            saving=saving,
        )

    def fill(self, value):
        """Overwrite every parameter."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(value)

    def values(self):
        """What the parameters hold on this rank."""
        local = [p.to_local() if hasattr(p, "to_local") else p for p in self.model.parameters()]
        return sorted({value for tensor in local for value in tensor.detach().flatten().tolist()})

    def over(self):
        """Return when this rank's part of the save in flight is over."""
        assert self.guard._saving._in_flight.wait(60)


def told(call):
    """Which error a call raises, and what it says."""
    try:
        return call()
    except CkptguardError as error:
        return [error.kind, error.message]


def present(folder):
    """Which checkpoints lie in a run, and whatever else but the records."""
    dist.barrier()
    return sorted(name for name in os.listdir(folder) if not name.startswith("_"))


def same_bytes(folder, kind):
    """A save that blocks and one behind training, of one state that changes right after the call."""
    training = Training(folder, kind)
    training.guard.save(0)  # without any state of the optimizer
    train(training.model, training.optimizer, training.scheduler, 1, 3)
    before = digest(training.model, training.optimizer)
    one = training.guard.save(3)
    with Held(1) as held:
        two = training.guard.save(4, blocking=False)
        train(training.model, training.optimizer, training.scheduler, 4, 5)
        training.fill(77)
        held.wait()
        early = [training.guard.wait_for_save(0), os.path.exists(two)]
        held.let_go.set()
        late = training.guard.wait_for_save()
    names = sorted(os.listdir(one))
    equal = [name for name in names if content(one, name) == content(two, name)]
    resumed = training.guard.resume()
    memory = training.guard._store._host._memory.numel()
    return [early, late, names, equal, resumed, digest(training.model, training.optimizer) == before, memory]


def content(folder, name):
    """The bytes of a file."""
    with open(os.path.join(folder, name), "rb") as file:
        return file.read()


def failures(folder):
    """Saves that cannot be written on one rank, or not be sealed; what each rank is told, and when."""
    training = Training(folder)
    guard, answers = training.guard, []
    guard.save(1)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "no space left")

    for rank, place, name in (
        (1, dcp_plan._HashingStream, "write"),
        (0, dcp_plan._HashingStream, "write"),
        (0, destinations, "seal_written"),
        (1, dcp_plan._Planner, "create_local_plan"),
    ):
        if place is dcp_plan._Planner:
            guard._store._last.plan = None  # made once
        with on_rank(rank, place, name, full):
            answers.append(told(lambda: os.path.basename(guard.save(2, blocking=False))))
            if guard._saving._in_flight is not None:
                training.over()
        if answers[-1] == "step-000000002":
            answers[-1] = told(lambda: guard.save(3))
    with on_rank(1, host_copy, "_allocated", no_room):
        guard._store._host = host_copy.HostCopy()
        guard.save(4, blocking=False)
        answers.append([guard._saving._in_flight is None, sorted(os.listdir(folder))])
    if dist.get_rank() == 1:
        training.fill(torch.nan)
    guard.save(5, blocking=False)
    training.over()
    answers += [told(guard.wait_for_save), guard._saving.found_sick, guard._saving.last]
    training.fill(6)
    guard.save(6, blocking=False)
    answers += [guard.wait_for_save(), present(folder)]
    guard._store._channel.ranks.broken = dist.get_rank() == 1  # a message was lost: they meet again elsewhere
    old = guard._store._channel
    training.fill(7)
    guard.save(7, blocking=False)
    answers += [guard.wait_for_save(), guard._store._channel is not old]
    with on_rank(1, FileSystemReader, "read_data", full):
        answers.append(told(guard.resume))
    return [*answers, guard.resume()]


def no_room(*_, **__):
    raise MemoryError("no room on rank 1")


def going_back(folder):
    """Rollbacks while a save is in flight, that ends in time or does not, stopped on one rank or the other."""
    training = Training(folder, deadline=0.1)
    guard, answers = training.guard, []
    for step, (rank, place, name) in enumerate(
        ((1, dcp_plan._HashingStream, "write"), (0, destinations, "make_room"), (0, destinations, "seal_written")), 1
    ):
        training.fill(step)
        guard.save(step * 10)
        with Held(rank, place, name) as held:
            training.fill(77)
            guard.save(step * 10 + 1, blocking=False)
            in_flight = guard._saving._in_flight
            held.wait()
            answers.append([guard.rollback(), training.values()])
            if step == 2:  # the next one begins while the one that was given up still sleeps
                training.fill(2.5)
                guard.save(22, blocking=False)
                held.let_go.set()
                answers.append([guard.wait_for_save(), guard.resume(), training.values()])
            held.let_go.set()
            assert in_flight.wait(60)
    guard._deadline = 40
    with Held(1) as held:
        training.fill(4)
        guard.save(40, blocking=False)
        held.wait()
        training.fill(77)
        threading.Timer(0.05, held.let_go.set).start()
        answers.append([guard.rollback(), training.values()])
    return [answers, present(folder)]


def busy(folder, when_busy):
    """Automatic saves, the one of step 2 held up on rank 1 until step 5, or until step 4 waits for it."""
    training = Training(folder, saving=ckptguard.Saving(blocking=False, when_busy=when_busy))
    for step, _ in training.guard.steps([torch.zeros(1)] * 8, total=6, save_every=2):
        training.fill(step)
        if step == 2:
            held = Held(1)
        if step == 3:
            held.wait()
        if step == (5 if when_busy == "skip" else 4):
            held.close()
            threading.Timer(0.05, held.let_go.set).start()
            if when_busy == "skip":
                training.over()
    in_flight = training.guard._saving._in_flight
    training.fill(77)
    return [in_flight is None, training.guard.resume(), training.values(), present(folder)]


def killed(folder, victim):
    """One rank is killed while it writes behind training; what the others are told by the next call."""
    training = Training(folder)
    training.fill(1)
    training.guard.save(1)
    with on_rank(victim, dcp_plan._HashingStream, "write", die):
        training.fill(2)
        training.guard.save(2, blocking=False)
        training.over()
    return told(lambda: training.guard.save(3))


def next_start(folder):
    """Where a training goes on some of whose ranks were killed."""
    training = Training(folder)
    return [training.guard.resume(), training.values(), present(folder)]


def many(folder, killed_runs):
    """All of the above, in one start of the ranks; then one more save, with which the interpreter ends."""
    answers = {
        "fsdp2": same_bytes(f"{folder}/fsdp2", "fsdp2"),
        "ddp": same_bytes(f"{folder}/ddp", "ddp"),
        "failures": failures(f"{folder}/failures"),
        "going back": going_back(f"{folder}/back"),
        "wait": busy(f"{folder}/wait", "wait"),
        "skip": busy(f"{folder}/skip", "skip"),
        "next start": [next_start(run) for run in killed_runs],
    }
    print("ANSWER" + json.dumps(answers), flush=True)
    training = Training(f"{folder}/last")
    training.guard.save(9, blocking=False)
    sys.exit(3)
