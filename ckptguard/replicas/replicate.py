"""Replicas: keep verified copies of a run's good checkpoints elsewhere, and find them when the run's own are lost."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from ckptguard.decisions.retention import Present, RetentionDecision, decide
from ckptguard.errors import (
    CkptguardError,
    CouldNotTellError,
    DeniedError,
    NotFoundError,
    ObjectMissingError,
    RecordsError,
    SettingsError,
    StoppedError,
)
from ckptguard.records.kept import read_kept
from ckptguard.records.lineage import refuse_another
from ckptguard.records.pins import InUse
from ckptguard.records.run import Run, open_run, read_record
from ckptguard.records.trash import trash_folder
from ckptguard.records.who_and_when import seconds_of, this_moment
from ckptguard.replicas.mirror_records import (
    clear_broken_beginning,
    join,
    mirror_beside,
    mirror_decisions,
    mirror_timeline,
    mirror_verdicts,
    records_beside,
)
from ckptguard.replicas.send_checkpoint import Replicated, has_arrived, replicated, send_checkpoint
from ckptguard.retention.prune import Pruned
from ckptguard.runs.file_signatures import looks_as_read
from ckptguard.runs.find_known_good import (
    ANY,
    REPLICA,
    SURE,
    Candidate,
    KnownGood,
    Wanted,
    candidate_of,
    is_newer,
    newest_candidate,
    none_found,
    ranked_candidates,
)
from ckptguard.runs.history import History
from ckptguard.runs.run_view import RunView
from ckptguard.runs.saved_together import RecordedSaves, answers, joined_in, newest_on_record
from ckptguard.runs.work import PLAIN, Work
from ckptguard.scan.paced_reader import Pace
from ckptguard.storage import normalise_url
from ckptguard.storage.failures import translated
from ckptguard.storage.protocol import find_entry
from ckptguard.storage.retries import Retries
from ckptguard.values.ids import CheckpointId, escape, name_of_run
from ckptguard.values.manifest import Manifest, identity
from ckptguard.values.own_log import log as _log
from ckptguard.values.retention_policy import Policy
from ckptguard.values.settings import ReplicaPlace, Settings
from ckptguard.values.verdict import Outcome

_THERE = ("there", "sent", "raced")
Save = tuple[Candidate, ...]  # all checkpoints of a save, its weights first


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """What one replica holds now. `behind`: how many wanted checkpoints are not good there; `last_good`: the newest
    that is. `trouble` says what ended the work early. `yielded`: `work.may_begin` ended it, so the next call should
    follow."""

    url: str
    behind: int | None
    last_good: CheckpointId | None
    checkpoints: tuple[Replicated, ...] = ()
    trouble: str | None = None
    yielded: bool = False
    pruned: Pruned | None = None  # what the rule of the place removed there

    @property
    def held(self) -> frozenset[CheckpointId]:
        """The checkpoints that are there for certain."""
        there = {one.id for one in self.checkpoints if one.done in _THERE}
        return frozenset(there if self.last_good is None else there | {self.last_good})


def furthest_behind(replicas: Sequence[Replica]) -> int | None:
    """Return how many checkpoints the replica lacks that lacks most. None: of some of them nobody knows."""
    behind = [replica.behind for replica in replicas]
    return None if None in behind else max((count for count in behind if count is not None), default=0)


def replicate(
    view: RunView,
    url: str,
    *,
    dry_run: bool = False,
    work: Work = PLAIN,
    hold: Callable[[], None] | None = None,
    arrived: set[CheckpointId] | None = None,
    only: Collection[CheckpointId] | None = None,
) -> Replica:
    """Send the good checkpoints of a run to one replica, newest first, and read each back from there.

    Problems with the replica are part of the result. What arrived stays, and the next call continues from there. `hold`
    waits while something more urgent runs. `arrived` remembers between calls what is there for good. `only` sends no
    other saves than those of these checkpoints. Raises SettingsError for a place that cannot be a replica of this run.
    """
    wanted = _wanted_in_replica(view)
    target: RunView | None = None
    sending: _Sending | None = None
    trouble: str | None = None
    try:
        target = open_replica(view, url, make=not dry_run, retries=Retries(stop=work.stop))
        wanted = _by_rule(view, target, wanted)
        if not dry_run:
            _mirror(view, target, wanted)
        with InUse(view.run, "replication") as in_use:
            arrived, pace = set() if arrived is None else arrived, pace_of(work, view.settings, hold)
            sending = _Sending(view, target, arrived, dry_run, work, pace, in_use)
            sending.send_all(save for save in wanted.saves if only is None or any(part.id in only for part in save))
    except CouldNotTellError as error:
        trouble = error.message
    rows = sending.rows() if sending is not None else []
    gone = {one.id for one in rows if one.done == "gone"}
    if sending is not None and trouble is None:
        rows += [_not_read(view, id, error) for id, error in wanted.unreadable.items()]
    behind, last = None, None
    with contextlib.suppress(CouldNotTellError):
        if target is not None:
            target.refresh()  # other processes may have sent some, too
            behind, last = _current_verdict(view, target, wanted, gone)
    return Replica(
        url=target.run.url if target is not None else normalise_url(url),
        behind=behind,
        last_good=last,
        checkpoints=tuple(one for one in rows if only is None or one.id in only),
        trouble=trouble,
        yielded=sending is not None and sending.yielded,
    )


def _mirror(view: RunView, target: RunView, wanted: _Wanted) -> None:
    """Tell a replica what is known of the run, besides the checkpoints that it is to hold."""
    join(view.run, target)
    mirror_decisions(view.run, target.run)
    mirror_verdicts(view, target)
    mirror_timeline(view, target, wanted.joined, wanted.offered)


@dataclass
class _Sending:
    """Sends whole saves to one replica. No part counts as good there before all of its save have arrived."""

    view: RunView
    target: RunView
    arrived: set[CheckpointId]
    dry_run: bool
    work: Work
    pace: Pace
    in_use: InUse
    yielded: bool = False  # `work.may_begin` ended it early
    _done: dict[CheckpointId, Replicated] = field(default_factory=dict)
    _verdicts: dict[CheckpointId, Callable[[], None]] = field(default_factory=dict)  # that are to be given

    def __post_init__(self) -> None:
        self._beside = records_beside(self.view.run)

    def rows(self) -> list[Replicated]:
        """Return what was done about each checkpoint."""
        why = "not all that is saved with it has arrived"
        late = {id: msgspec.structs.replace(self._done[id], done="failed", message=why) for id in self._verdicts}
        return [late.get(id, one) for id, one in self._done.items()]

    def send_all(self, saves: Iterable[Save]) -> None:
        """Send what is missing of each save, until the work yields to other runs."""
        for save in saves:
            self._send(save)
            if self.yielded:
                return

    def _send(self, save: Save) -> None:
        for part in save:
            if part.id not in self._done:
                one = self._one(part)
                if one is None:
                    self.yielded = True
                    return
                self._done[part.id] = one
        if all(self._done[part.id].done in _THERE for part in save):
            for id in (part.id for part in save):
                give_verdict = self._verdicts.pop(id, None)
                if give_verdict is not None:
                    self._judge(id, give_verdict)

    def _one(self, part: Candidate) -> Replicated | None:
        run = self.view.run
        try:
            if _is_there(self.view, self.target, part, self.arrived):
                return replicated(part, "there")
            if self.dry_run:
                return replicated(part, "would send")
            if not self.work.may_begin(part.manifest.bytes):
                return None
            self.in_use.pin(part.id)
            mirror_beside(run, self.target.run, part.manifest, self._beside)
            one, give_verdict = send_checkpoint(self.view, self.target, part, work=self.work, pace=self.pace)
            if give_verdict is not None:
                self._verdicts[part.id] = give_verdict
                self.target.refresh(part.id.series)  # its name is taken, before there is a verdict
        except StoppedError:
            raise
        except CkptguardError as error:
            one = replicated(part, "failed", message=error.message)
        if one.done in ("failed", "damaged") and _is_gone(self.view, part):
            return replicated(part, "gone", message="it was removed from the run meanwhile")
        return one

    def _judge(self, id: CheckpointId, give_verdict: Callable[[], None]) -> None:
        try:
            give_verdict()
        except StoppedError:
            raise
        except CkptguardError as error:
            self._done[id] = msgspec.structs.replace(self._done[id], done="failed", message=error.message)


def pace_of(work: Work, settings: Settings, hold: Callable[[], None] | None = None) -> Pace:
    """Return one pace for all files in transfer, in both directions: the work's rate, else that of the settings.

    It raises StoppedError once the work is stopped. `hold` waits while something more urgent runs.
    """

    def hold_on() -> None:
        if work.is_stopped():
            raise StoppedError("it was stopped", key="")
        if hold is not None:
            hold()

    return Pace(settings.replica_rate if work.rate is None else work.rate, hold_on, work.progress)


def replica_urls(url: str, settings: Settings) -> tuple[str, ...]:
    """Return where the settings want replicas of the run at `url`, local ones first. ``{run}`` is the run's name."""
    return tuple(replica_places(url, settings))


def replica_places(url: str, settings: Settings) -> dict[str, ReplicaPlace]:
    """Return the same, each URL with its rule. Of several rules for one place the first counts."""
    name, found = name_of_run(url), dict[str, ReplicaPlace]()
    for place in settings.places:
        found.setdefault(normalise_url(place.url.replace("{run}", name)), place)
    return dict(sorted(found.items(), key=lambda one: "://" in one[0]))


def open_replica(view: RunView, url: str, *, make: bool = False, retries: Retries | None = None) -> RunView:
    """Open a replica of a run. Raises SettingsError if one of them is inside the other."""
    place, settings = normalise_url(url), view.settings.of_replica()
    refuse_nested(view.run.url, place, f"{place} cannot be a replica of {view.run.url}")
    if make and "://" not in place:
        with translated("", place):
            os.makedirs(place, exist_ok=True)
    opening = functools.partial(open_run, place, settings, must_exist=False, retries=retries)
    try:
        run = opening()
    except RecordsError:
        if not make:
            raise
        clear_broken_beginning(place, settings.storage)
        run = opening()
    return RunView(run, settings)


def refuse_nested(one: str, other: str, sentence: str) -> None:
    """Raise SettingsError if the places are equal, or one is inside the other."""
    real = [url if "://" in url else os.path.realpath(url) for url in map(normalise_url, (one, other))]
    first, second = (place.rstrip("/") + "/" for place in real)
    if first.startswith(second) or second.startswith(first):
        raise SettingsError(f"{sentence}: one is inside the other", hint="name another place")


class _Readable(RecordedSaves):
    """The saves of a run, where one that cannot be read holds up no other."""

    def __init__(self, history: History) -> None:
        super().__init__(history, ANY, every_copy=True)
        self.unreadable: dict[CheckpointId, CouldNotTellError] = {}

    def offer(self, id: CheckpointId) -> Candidate | None:
        """Return where a checkpoint is, or None if it is not good, gone, or cannot be read."""
        try:
            return super().offer(id)
        except CouldNotTellError as error:
            self.unreadable[id] = error
            return None


class _Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Every known-good save of a run, newest first. A good checkpoint of a save that is not good is none. `joined` are
    the series that are saved together with others; `unreadable` has the errors of checkpoints that cannot be read."""

    saves: list[Save] = []
    joined: frozenset[str] = frozenset()
    unreadable: dict[CheckpointId, CouldNotTellError] = {}
    not_kept: list[Save] = []  # that the rule of the place does not keep

    @property
    def offered(self) -> set[CheckpointId]:
        """All checkpoints that a replica is to hold."""
        return {part.id for save in self.saves for part in save}


def _wanted_in_replica(view: RunView) -> _Wanted:
    source = _Readable(view.history)
    groups = joined_in(source)
    saves = [save for group in groups for save in _two_first([a.save for a, _ in answers(source, group)])]
    joined = frozenset(name for group in groups for name in group.names)
    alone = (source.offer(id) for id in ranked_candidates(view.history) if id.series not in joined)
    saves += [(candidate,) for candidate in alone if candidate is not None]
    saves.sort(key=lambda save: save[0].id.order, reverse=True)
    return _Wanted(saves=saves, joined=joined, unreadable=source.unreadable)


def _by_rule(view: RunView, target: RunView, wanted: _Wanted) -> _Wanted:
    """Return what the rule of a place keeps of the wanted saves."""
    place = replica_places(view.run.url, view.settings).get(target.run.url)
    if place is None or not place.policy().has_rules:
        return wanted
    kept = {one.checkpoint.path for one in decide_with_run(view, target, place.policy(), wanted.saves) if one.keep}
    saves: dict[bool, list[Save]] = {True: [], False: []}
    for save in wanted.saves:
        saves[any(part.manifest.path in kept for part in save)].append(save)
    return msgspec.structs.replace(wanted, saves=saves[True], not_kept=saves[False])


def what_rule_removes(view: RunView, target: RunView, policy: Policy) -> frozenset[str]:
    """Return the paths that a rule removes in a replica, once all that it keeps has arrived there."""
    decisions = decide_with_run(view, target, policy, _wanted_in_replica(view).saves)
    there = {one.path for one in _good_in(view, target)}
    return frozenset(one.checkpoint.path for one in decisions if not one.keep and one.checkpoint.path in there)


def thinned_in_run(view: RunView, target: RunView) -> frozenset[str]:
    """Return the paths of what is thinned in a run, and good and whole in its replica."""
    saves = _wanted_in_replica(view).saves
    thinned = {part.manifest.path for save in saves for part in save if part.manifest.thinned}
    return frozenset(one.path for one in _good_in(view, target) if one.path in thinned and not one.thinned)


def decide_with_run(view: RunView, target: RunView, policy: Policy, saves: Sequence[Save]) -> list[RetentionDecision]:
    """Decide by the rule of a place about what the run has for it and what it has already.

    So what is sent stays at the next pruning there, and what that removes is not sent again.
    """
    by_path = {one.path: one for one in _good_in(view, target)}
    ids: dict[str, CheckpointId] = {path: one.id for path, one in by_path.items()}
    for part in (part for save in saves for part in save):
        one = _as_present(part.id, part.manifest)
        ids.setdefault(one.path, one.id)
        by_path.setdefault(one.path, one)
    together = [{ids[part.manifest.path] for part in save} for save in saves if len(save) > 1]
    return decide(list(by_path.values()), policy, now=this_moment().wall, saves=together)


def _good_in(view: RunView, target: RunView) -> Iterator[Present]:
    """Yield the good checkpoints in place in a replica, as far as the records of both know them."""
    with contextlib.suppress(ObjectMissingError):
        for checkpoint in target.checkpoints:
            history, known = target.history, target.history.generations(checkpoint.series, checkpoint.step)
            id = next((id for id in reversed(known) if history.has_verdict(id)), None)
            verdict = history.current_verdict(id) if id is not None else None
            manifest = (view.history.manifest(id) or history.manifest(id)) if id is not None else None
            if verdict is not None and manifest is not None and verdict.outcome is Outcome.GOOD:
                yield _as_present(verdict.id, manifest)


def _as_present(id: CheckpointId, manifest: Manifest) -> Present:
    return Present(
        path=manifest.path,
        id=id,
        outcome=Outcome.GOOD,
        saved=seconds_of(manifest.sealed_at),
        metrics=manifest.metrics,
        bytes=manifest.bytes,
        thinned=bool(manifest.thinned),
    )


def _two_first(saves: list[Save]) -> list[Save]:
    """Return saves of one group with the newest two as one: a replica with one alone may not read the numbers in its
    names, which join its parts."""
    if len(saves) < 2:
        return saves
    known = {part.id for part in saves[0]}
    return [(*saves[0], *(part for part in saves[1] if part.id not in known)), *saves[2:]]


def _current_verdict(
    view: RunView, target: RunView, wanted: _Wanted, gone: Collection[CheckpointId] = ()
) -> tuple[int, CheckpointId | None]:
    """Return how many of the wanted checkpoints are not good in a replica, and the newest that is, with all that is
    saved with it. Raises CouldNotTellError."""
    parts = {part.id: part for save in wanted.saves for part in save if part.id not in gone}
    good = {id: target.is_good(id) or _is_whole_there(view, target, part) for id, part in parts.items()}
    last = next((save[0].id for save in wanted.saves if all(good.get(part.id, False) for part in save)), None)
    if last is None:
        last = next((save[0].id for save in wanted.not_kept if all(target.is_good(part.id) for part in save)), None)
    return list(good.values()).count(False), last


def _is_there(view: RunView, target: RunView, candidate: Candidate, arrived: set[CheckpointId]) -> bool:
    """True if nothing needs sending. What is there for good is noted in `arrived`."""
    if candidate.id not in arrived and (
        _is_whole_there(view, target, candidate) or (has_arrived(target, candidate) and not _is_lost(target, candidate))
    ):
        arrived.add(candidate.id)
    return candidate.id in arrived


def _is_whole_there(view: RunView, target: RunView, candidate: Candidate) -> bool:
    """True if a replica has the whole checkpoint that was thinned in the run."""
    manifest, history = candidate.manifest, target.history
    if not manifest.thinned:
        return False
    id = history.current_if_readable(manifest.series, manifest.step, manifest.path)
    there = history.manifest(id) if id is not None and history.is_good(id) else None
    if there is None or set(identity(manifest.files)) <= set(identity(there.files)):
        return there is not None
    # Of a file that was written anew only the run's own record of the whole one says what it was.
    whole = _before_thinning(view.history, manifest)
    return whole is not None and identity(whole.files) == identity(there.files)


def _before_thinning(history: History, manifest: Manifest) -> Manifest | None:
    """Return the whole checkpoint that was thinned to this one, or None if no record of it can be read."""
    took = {(path, size) for path, size, *_ in manifest.thinned}
    stays = {one for one in identity(manifest.files) if one[0] not in {path for path, _ in took}}
    for id in reversed(history.generations(manifest.series, manifest.step)):
        whole = history.manifest(id) if id.generation < manifest.generation else None
        if whole is None or whole.path != manifest.path:
            continue
        is_it = took <= {(f.path, f.size) for f in whole.files} and stays <= set(identity(whole.files))
        return whole if is_it else None
    return None


def _is_lost(target: RunView, candidate: Candidate) -> bool:
    """True if only a replica's records hold a checkpoint: its files are damaged, missing or changed, and nobody pruned
    it."""
    run, verdict = target.run, target.history.verdict(candidate.id)
    if verdict is None or verdict.outcome is not Outcome.GOOD:
        return verdict is not None and verdict.place_damaged and verdict.content is Outcome.GOOD
    sealed = target.history.manifest(candidate.id)
    found = (find_entry(run.storage, f.path) for f in candidate.manifest.files)
    if sealed is not None and looks_as_read([e for e in found if e is not None], sealed, verdict):
        return False
    return read_kept(run, candidate.id) is None and not _is_trashed(run, candidate.id)


def _is_gone(view: RunView, candidate: Candidate) -> bool:
    """True if retention or the trainer has removed the whole checkpoint since it was found."""
    id = candidate.id
    try:
        view.refresh(id.series)
        found = view.history.current_verdict(id)
        if found is None or found.outcome is not Outcome.GOOD:
            return False
        files = candidate.manifest.files
        left = read_kept(view.run, id) is not None or any(find_entry(view.run.storage, f.path) for f in files)
        return not left or _is_trashed(view.run, id)
    except CouldNotTellError:
        return False


def _is_trashed(run: Run, id: CheckpointId) -> bool:
    return read_record(run, trash_folder(id) + ".json") is not None


def _not_read(view: RunView, id: CheckpointId, error: CouldNotTellError) -> Replicated:
    manifest = None
    with contextlib.suppress(CouldNotTellError):
        manifest = view.history.manifest(id)
    path, size = (manifest.path, manifest.bytes) if manifest is not None else (id.series, 0)
    return Replicated(path=path, id=id, bytes=size, done="failed", message=error.message)


def open_replicas(view: RunView) -> Iterator[RunView]:
    """Yield the replicas that can be read, local ones first. Others, and those of another training, get a warning."""
    for url in replica_urls(view.run.url, view.settings):
        try:
            replica = _open_own(view, url)
            replica.run.storage.stat("")
        except (CouldNotTellError, NotFoundError) as error:
            _log.warning("the replica %s cannot be used: %s", url, error.message)
            continue
        yield replica


def replica_states(view: RunView) -> tuple[Replica, ...]:
    """Return the current state of each replica."""
    urls = replica_urls(view.run.url, view.settings)
    wanted = _wanted_in_replica(view) if urls else _Wanted()
    found = []
    for url in urls:
        try:
            refuse_impossible(url)
            target = _open_own(view, url)
            behind, last = _current_verdict(view, target, _by_rule(view, target, wanted))
            found.append(Replica(url=url, behind=behind, last_good=last))
        except CouldNotTellError as error:
            found.append(Replica(url=url, behind=None, last_good=None, trouble=error.message))
    return tuple(found)


def refuse_impossible(place: str) -> None:
    """Raise DeniedError if a local place does not exist and cannot be made."""
    above = place
    while "://" not in place and not os.path.lexists(above):
        above = os.path.dirname(above)
    if "://" in place or (os.path.isdir(above) and os.access(above, os.W_OK | os.X_OK)):
        return
    why = "cannot be written to" if os.path.isdir(above) else "is not a folder"
    raise DeniedError(f"there can be no replica at {escape(place)}: {escape(above)} {why}", key=place)


def _open_own(view: RunView, url: str) -> RunView:
    """Open a replica. Raises CouldNotTellError if it is not a replica of this training."""
    replica = open_replica(view, url, retries=Retries(attempts=2, total=5.0))
    refuse_another(view.run, replica.run)
    return replica


Choose = Callable[[RunView, Wanted], Candidate | None]  # the best known-good checkpoint of a run, or of a replica


def known_bad(history: History, id: CheckpointId) -> bool:
    """True if a run has a verdict on this content that is not good."""
    return history.has_verdict(id) and not history.is_good(id)


def has_newest(history: History, id: CheckpointId, wanted: Wanted = ANY) -> bool:
    """True if no newer wanted checkpoint is on record as good."""
    newest: dict[str, tuple[CheckpointId, ...]] = {}
    source = RecordedSaves(history, wanted, every_copy=False)
    for group in joined_in(source):
        if all(map(wanted.is_of, group.names)):
            newest |= dict.fromkeys(group.names, newest_on_record(source, group))
    for other in ranked_candidates(history, wanted):
        if other.series not in newest and (other == id or history.is_good(other)):
            newest[other.series] = (other,)
    present = (other == id or candidate_of(history, other) is not None for save in newest.values() for other in save)
    return newest.get(id.series, ())[:1] == (id,) and all(present)


def newer_in_replica(
    replica: RunView, view: RunView, wanted: Wanted, own: Candidate | None, choose: Choose = newest_candidate
) -> Candidate | None:
    """Return a replica's best checkpoint that is not known to be bad, if newer than `own`. Raises CouldNotTellError."""
    while (best := choose(replica, wanted)) is not None and any(known_bad(view.history, p.id) for p in best.save):
        wanted = msgspec.structs.replace(wanted, exclude=wanted.exclude | {best.id})
    return best if best is not None and (own is None or is_newer(best, own)) else None


def find_known_good_anywhere(view: RunView, wanted: Wanted = SURE, choose: Choose = newest_candidate) -> KnownGood:
    """Return the newest known-good checkpoint that `choose` finds, at its nearest place: the run, a kept copy, a
    replica.

    Replicas are read only if the run has lost what is on record as good. Raises NoKnownGoodError.
    """
    best = choose(view, wanted)
    if best is not None and has_newest(view.history, best.id, wanted):
        return best.answer
    for replica in open_replicas(view):
        try:
            found = newer_in_replica(replica, view, wanted, best, choose)
        except CouldNotTellError as error:
            _log.warning("the replica %s cannot be used: %s", replica.run.url, error.message)
            continue
        if found is not None:
            url, answer = replica.run.url, found.answer
            reason = f"verified {answer.verified_at}; the run has no copy of it, so this is the replica {url}"
            save = tuple(msgspec.structs.replace(part, place=REPLICA) for part in answer.save)
            answer = msgspec.structs.replace(answer, place=REPLICA, reason=reason, save=save)
            best = msgspec.structs.replace(found, answer=answer)
    if best is None:
        raise none_found(view.run, wanted.before_step)
    return best.answer
