"""Several supervises of one job that share a run, one on each node. One of them leads: it watches the saves and goes
back for all. All start their commands together, and all stop when one of them has to.

They tell each other by records of the run. A thread reads and writes those, so that storage that hangs holds up nobody.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ckptguard.decisions.restarts import describe
from ckptguard.errors import BusyError, CkptguardError, CouldNotTellError, SettingsError
from ckptguard.records.leases import new_lease, release, renew, surely_gone
from ckptguard.records.nodes import (
    Leader,
    MemberLease,
    NodeReport,
    Order,
    dissolve,
    lead,
    member_of,
    names_in_session,
    read_order,
    read_report,
    tell,
)
from ckptguard.records.run import Run, open_run
from ckptguard.records.who_and_when import this_host
from ckptguard.storage import normalise_url
from ckptguard.supervise.command import SupervisedCommand, Wait
from ckptguard.values.ids import short_digest
from ckptguard.values.settings import Settings

_LOOK, _RENEW = 1.0, 10.0  # seconds
_LEAVE = 15.0  # seconds for the others to read the last order


class NodeGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The supervises of one job: `id` is equal for all of them, `rank` is this one's number of `size`."""

    id: str
    rank: int
    size: int


def group_of(environ: Mapping[str, str]) -> NodeGroup | None:
    """Return the group that srun or torchrun started this supervise in, or None if it is alone."""
    for size, rank, names in (
        ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID")),
        ("WORLD_SIZE", "RANK", ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")),
    ):
        with contextlib.suppress(KeyError, ValueError):
            own, every = int(environ[rank]), int(environ[size])
            if every > 1 and names[-1] in environ and 0 <= own < every:
                return NodeGroup(
                    id=short_digest("\0".join(environ.get(name, "") for name in names)), rank=own, size=every
                )
    return None


class Nodes:
    """This supervise among the others. Any thread may call it; what it shows is at most a second old."""

    def __init__(self, url: str, settings: Settings, group: NodeGroup, *, seconds: float) -> None:
        self._url, self._settings, self._group, self._seconds = url, settings, group, seconds
        self.rank = group.rank
        self._round = 0
        self._session: Leader | None = None
        self._mine: MemberLease | None = None
        self._seen: dict[int, MemberLease] = {}  # by rank
        self._messages: dict[str, Order | NodeReport] = {}  # of all, by their names
        self._to_tell: queue.SimpleQueue[tuple[str, Order | NodeReport]] = queue.SimpleQueue()
        self._renewed_at = self._heard_at = time.monotonic()  # when the storage answered last
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, name="nodes", daemon=True)
        self.leads = False
        self.trouble: str | None = None  # why the session cannot go on

    def join(self) -> CkptguardError | None:
        """Find all others. Returns why that is not possible. It may take as long as they have for it."""
        deadline = time.monotonic() + self._seconds
        try:
            if os.path.isabs(folder := normalise_url(self._url)):
                os.makedirs(folder, exist_ok=True)
            while True:
                run = self._open()
                leader, leads = lead(run, self._group.id, self._group.size)
                if leader.group != self._group.id:
                    return BusyError(
                        f"another supervise (process {leader.owner.pid} on {leader.owner.host}) runs for {run.url}"
                    )
                mine = new_lease(MemberLease, session=leader.token, rank=self._group.rank)
                renew(run, mine)
                while not surely_gone(run, leader):
                    self._look_for_members(run, leader.token)
                    if len(self._seen) == self._group.size:
                        self._session, self._mine, self.leads = leader, mine, leads
                        self._thread.start()
                        return None
                    if time.monotonic() > deadline or self._ending.wait(_LOOK):
                        self._leave(run, leader if leads else None, mine)
                        if self._ending.is_set():
                            return BusyError("it was asked to end before all nodes were there")
                        return self._not_shared()
        except CkptguardError as error:
            return error
        except OSError as error:
            return CkptguardError(f"{self._url} cannot be made: {error.strerror}")

    def begin_round(self) -> None:
        """As the leader: have all start their commands."""
        self._round += 1
        self._to_tell.put((f"order.{self._round}", Order(start=True)))

    def order(self) -> Order | None:
        """As a member: return what to do next, once that is known. An order to start begins the next round."""
        found = self._messages.get(f"order.{self._round + 1}")
        if not isinstance(found, Order):
            return None
        self._round += found.start
        return found

    def stop(self, why: str, status: int = 0, *, asked: bool = False) -> None:
        """Have all stop their commands. The first reason counts."""
        self._to_tell.put((f"stop.{self._round}", self._report(status, asked, why)))

    def report(self, status: int, *, asked: bool) -> None:
        """Say how the command ended here. Unless it ended well, all others stop theirs."""
        why = f"the command {describe(status)}"
        if status or asked:
            self.stop(why, status, asked=asked)
        self._to_tell.put((f"report.{self._round}.{self._group.rank}", self._report(status, asked, why)))

    def cause(self) -> NodeReport | None:
        """Return the report of another node because of which all stop, or None."""
        report = self._messages.get(f"stop.{self._round}")
        return report if isinstance(report, NodeReport) and report.rank != self._group.rank else None

    def all_reported(self) -> bool:
        """True if the command ended on all nodes, or the session cannot go on."""
        names = (f"report.{self._round}.{rank}" for rank in range(self._group.size))
        return self.trouble is not None or all(name in self._messages for name in names)

    def _report(self, status: int, asked: bool, why: str) -> NodeReport:
        return NodeReport(rank=self._group.rank, host=this_host()[0], status=status, asked=asked, why=why)

    def end(self, status: int, why: str = "") -> None:
        """Leave. The leader has all others end with this exit code, and waits for them, but not long."""
        if self.leads:
            self._to_tell.put((f"order.{self._round + 1}", Order(start=False, status=status, why=why)))
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(_LEAVE + 1.0 if self.leads else 1.0)

    def _open(self) -> Run:
        return open_run(self._url, self._settings, must_exist=False)

    def _not_shared(self) -> CkptguardError:
        missing = [str(rank) for rank in range(self._group.size) if rank not in self._seen]
        return SettingsError(
            f"of {self._group.size} supervises of this job, {len(self._seen)} were seen in {self._url} after"
            f" {self._seconds:g} s; missing: rank {', '.join(missing)}",
            hint="the run must be on storage that all nodes share; --alone if each has a run of its own",
        )

    def _look_for_members(self, run: Run, session: str) -> None:
        there = names_in_session(run, session)
        for rank in range(self._group.size):
            if rank not in self._seen and f"member.{rank}" in there:
                member = member_of(run, session, rank)
                if member is not None:
                    self._seen[rank] = member

    def _work(self) -> None:
        """The thread: tell, listen, and see who is gone."""
        assert self._session is not None
        assert self._mine is not None
        leave_at: float | None = None
        while True:
            try:
                self._exchange(self._open(), self._session, self._mine)
            except (CkptguardError, OSError) as error:
                silent = time.monotonic() - self._heard_at
                if silent > (MemberLease.silence or 0.0):
                    self.trouble = self.trouble or f"the run could not be reached for {silent:.0f} s: {error}"
            if self._ending.is_set():
                leave_at = leave_at or time.monotonic() + _LEAVE
                if not self.leads or len(self._seen) <= 1 or self.trouble or time.monotonic() > leave_at:
                    break
            self._ending.wait(_LOOK) if leave_at is None else time.sleep(_LOOK)
        with contextlib.suppress(CkptguardError):
            self._leave(self._open(), self._session if self.leads else None, self._mine)

    def _exchange(self, run: Run, session: Leader, mine: MemberLease) -> None:
        while not self._to_tell.empty():
            name, value = self._to_tell.get()
            try:
                tell(run, session.token, name, value)
            except CouldNotTellError:
                self._to_tell.put((name, value))
                raise
        if time.monotonic() > self._renewed_at + _RENEW:
            renew(run, mine)
            if self.leads:
                renew(run, session)
            self._renewed_at = time.monotonic()
        there, before = names_in_session(run, session.token), (len(self._messages), self.trouble)
        for name in there - self._messages.keys():
            read = read_order if name.startswith("order.") else read_report
            found = None if name.startswith("member.") else read(run, session.token, name)
            self._messages |= {} if found is None else {name: found}
        self._heard_at = time.monotonic()
        for rank, member in list(self._seen.items()):
            if f"member.{rank}" not in there and self._ending.is_set():
                del self._seen[rank]  # it has left
            elif rank != mine.rank and not self._all_end() and surely_gone(run, member):
                self.trouble = self.trouble or (
                    f"{member.owner.host} (rank {rank}) was lost: its supervise, process {member.owner.pid}, has ended"
                    " or was not seen for a minute"
                )
        if before != (len(self._messages), self.trouble):
            os.kill(os.getpid(), signal.SIGCHLD)  # who waits looks again

    def _all_end(self) -> bool:
        """True if everybody may go."""
        return any(isinstance(one, Order) and not one.start for one in self._messages.values())

    def _leave(self, run: Run, leader: Leader | None, mine: MemberLease) -> None:
        with contextlib.suppress(CkptguardError):
            release(run, mine)
        if leader is not None:
            dissolve(run, leader)


class CommandOnNodes(SupervisedCommand):
    """The command on all nodes as one: it has ended when all have, and its status is that of the node because of which
    all stopped."""

    def __init__(
        self, nodes: Nodes, is_asked: Callable[[], bool], stop_seconds: float, tell: Callable[[str], None], *what: Any
    ) -> None:
        super().__init__(*what)
        self._nodes, self._is_asked, self.stop_seconds, self.tell = nodes, is_asked, stop_seconds, tell
        self._kill_at: float | None = None  # monotonic; other nodes have stopped
        self._open = self._reported = self._asked = False

    @property
    def lost(self) -> str | None:
        """Why there can be no further start."""
        return self._nodes.trouble

    @property
    def asked_elsewhere(self) -> bool:
        """True if another node was asked to end."""
        cause = self._nodes.cause()
        return cause is not None and cause.asked

    def start(self) -> None:
        if self._nodes.leads:
            self._nodes.begin_round()
        self._kill_at, self._open, self._reported, self._asked = None, True, False, False
        super().start()

    def has_ended(self) -> bool:
        if not super().has_ended():
            self._stop_with_others()
            return False
        if not self._open:
            return True
        if not self._reported:
            self._reported = True
            self._nodes.report(self.status or 0, asked=self._is_asked())
        elif self._is_asked() and not self._asked:
            self._asked = True
            self._nodes.stop("it was asked to end", asked=True)
        if self._nodes.leads and not self._nodes.all_reported():
            return False
        self._open = False
        if (cause := self._nodes.cause()) is not None and self.status is not None:
            self.status = cause.status or self.status
        return True

    def stop(self, seconds: float, wait: Wait) -> None:
        self._nodes.stop("its saves are sick")
        super().stop(seconds, wait)

    def _stop_with_others(self) -> None:
        cause, why, now = self._nodes.cause(), self.lost, time.monotonic()
        if cause is not None:
            why = f"stopping the command: on {cause.host} (rank {cause.rank}), {cause.why}"
        if why is None:
            return
        if self._kill_at is None:
            self._kill_at = now + self.stop_seconds
            self.tell(why)
            self.send(signal.SIGTERM)
        elif now > self._kill_at:
            self.kill()


def follow(nodes: Nodes, command: CommandOnNodes, wait: Wait, asked: Callable[[], bool]) -> tuple[int, str | None]:
    """Do what the leader says, until it says to end. Returns the exit code, and why that is an error, if it is one."""
    while (order := _next_order(nodes, wait, asked)) is not None and order.start:
        command.start()
        if command.trouble is not None:
            command.tell(command.trouble)
        wait(command.has_ended, None)
        if (command.status or nodes.trouble) and not command.stop_the_rest(command.stop_seconds, wait):
            return command.status or 1, "the command could not be stopped: some of its processes survive SIGKILL"
    return (1, nodes.trouble) if order is None else (order.status, None)


def _next_order(nodes: Nodes, wait: Wait, asked: Callable[[], bool]) -> Order | None:
    """Wait for an order; once asked to end, not much longer for the leader, who was told. None if none comes."""
    order: Order | None = None
    leave_at = float("inf")

    def is_over() -> bool:
        nonlocal order, leave_at
        order = order or nodes.order()
        if asked():
            leave_at = min(leave_at, time.monotonic() + _LEAVE)
        return order is not None or nodes.trouble is not None or time.monotonic() > leave_at

    wait(is_over, None)
    return order
