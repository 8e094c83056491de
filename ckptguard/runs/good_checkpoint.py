"""A good checkpoint, what is known about where it is, and which ones are wanted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import msgspec

from ckptguard.decisions.known_good import IN_PLACE, KEPT
from ckptguard.errors import RecordsError, StorageError
from ckptguard.records.kept import KeptCopy, read_kept
from ckptguard.records.run import Run
from ckptguard.runs.file_signatures import looks_as_read, other_ctimes
from ckptguard.runs.history import History
from ckptguard.runs.sealed_content import Judged, Sealed, kept_matches, seen_when_sealed
from ckptguard.storage.failures import is_unreadable
from ckptguard.storage.protocol import Entry, find_entry
from ckptguard.values.ids import CheckpointId, Step, folder_of
from ckptguard.values.manifest import Manifest
from ckptguard.values.verdict import Outcome


class SavePart(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint of a save of several. `rule` joined it; `behind` is how many saves before the others it was
    saved."""

    path: str
    series: str
    step: Step
    id: CheckpointId
    role: str
    place: str
    rule: str
    behind: int


class KnownGood(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint to go back to. `path` can be opened as it is. `place` is "in place", "kept" or "replica". `save` are
    all checkpoints that were saved with it, itself too; there are none if it is a save by itself. `thinned` are the
    parts that were taken away, which a resume would restart."""

    path: str
    id: CheckpointId
    kept: bool
    verified_at: str
    reason: str
    place: str = IN_PLACE
    save: tuple[SavePart, ...] = ()
    thinned: tuple[str, ...] = ()

    @property
    def series(self) -> str:
        """The series of the checkpoint."""
        return self.id.series

    @property
    def step(self) -> Step:
        """The step that its name states."""
        return self.id.step


def alone(path: str, id: CheckpointId, place: str) -> SavePart:
    """Describe a checkpoint that is a save by itself as the only part of it. Its name says what it holds."""
    from ckptguard.decisions.names import role_of  # few answers need it

    role = role_of(id.series)
    return SavePart(
        path=path,
        series=id.series,
        step=id.step,
        id=id,
        role="model" if role == "unknown" else role,
        place=place,
        rule="",
        behind=0,
    )


def _as_thinned(answer: KnownGood, sealed: Sealed) -> KnownGood:
    """Say what a resume from a checkpoint that was thinned would lose."""
    from ckptguard.layouts.thinning import roles_taken  # few are

    taken = roles_taken(path for path, *_ in sealed.thinned)
    lost = f"it is thinned, so a resume would restart: {', '.join(taken)}"
    return msgspec.structs.replace(answer, thinned=taken, reason=f"{answer.reason}; {lost}")


class Presence(msgspec.Struct, frozen=True, kw_only=True):
    """The place of a known-good checkpoint, and the answer that describes it.

    `changed`: the files in place have the sealed sizes, but storage describes them differently than when they were
    read. Read such files again before you call them good. `entries` are the files in place. `parts` are all of its
    save, itself too, by the rule that joined them; there are none if nothing was saved with it.
    """

    answer: KnownGood
    in_place: bool
    changed: bool
    copy: KeptCopy | None
    entries: tuple[Entry, ...] = ()
    parts: tuple[tuple[Presence, str], ...] = ()

    @property
    def id(self) -> CheckpointId:
        """The id of the checkpoint."""
        return self.answer.id


class Candidate(Presence, frozen=True, kw_only=True):
    """A known-good checkpoint with the manifest that its use needs. Its parts are candidates, too."""

    manifest: Manifest

    @property
    def save(self) -> tuple[Candidate, ...]:
        """Every checkpoint of its save."""
        return tuple(part for part, _ in self.parts if isinstance(part, Candidate)) or (self,)

    def touched(self, run: Run) -> dict[str, int]:
        """Return the ctimes, by path, of the files in place to which something happened since they were read, while
        storage describes them as then. Read these before somebody trains with them."""
        ctimes = other_ctimes(self.entries, self.manifest) if self.in_place and not self.changed else {}
        if ctimes:
            from ckptguard.records.after_seal import read_ctimes  # few answers need it

            ctimes = {} if ctimes.items() <= read_ctimes(run, self.id).items() else ctimes
        return ctimes


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Which known-good checkpoints may be taken. `before_step` is exclusive; `only` allows a single checkpoint.

    A name without a single number takes its step from a counter inside. Without one it is before no step. With `sure`,
    files that changed since they were read count as gone: use it if you do not read them. With `thinned`, what was
    thinned comes after everything else; without it, nobody is led there.
    """

    before_step: int | None = None
    series: str | None = None
    folders: frozenset[str] | None = None
    among: frozenset[str] | None = None  # series
    exclude: frozenset[CheckpointId] = frozenset()
    step: int | None = None
    only: CheckpointId | None = None
    sure: bool = False
    thinned: bool = False

    def is_of(self, series: str) -> bool:
        """True if checkpoints of this series may be wanted."""
        in_folder = self.folders is None or folder_of(series) in self.folders
        return self.series in (None, series) and in_folder and (self.among is None or series in self.among)

    def includes(self, id: CheckpointId, manifest: Manifest | None = None) -> bool:
        """True if a checkpoint with this step is wanted. Of a name without a number only its manifest says that."""
        if self.before_step is None and self.step is None:
            return True
        step = id.number if manifest is None else manifest.training_step
        if step is None:
            return manifest is None
        return (self.before_step is None or step < self.before_step) and self.step in (None, step)


ANY = Wanted()
SURE = Wanted(sure=True)
P = TypeVar("P", bound=Presence)


def candidate_of(
    history: History, id: CheckpointId, wanted: Wanted = ANY, *, every_copy: bool = True
) -> Candidate | None:
    """Return the checkpoint if it is good, present, and of a wanted step; else None. Raises CouldNotTellError."""
    verdict = history.good_verdict(id)
    manifest = history.manifest(id) if verdict is not None else None
    if verdict is None or manifest is None or not wanted.includes(id, manifest):
        return None
    found = presence_of(history, id, verdict, manifest, every_copy=every_copy, sure=wanted.sure)
    return None if found is None else Candidate(**msgspec.structs.asdict(found), manifest=manifest)


def full_first(found: Iterable[P], wanted: Wanted) -> Iterator[P]:
    """Yield what was not thinned, in its order, then the rest if it is wanted."""
    thinned = []
    for one in found:
        if one.answer.thinned:
            thinned.append(one)
        else:
            yield one
    if wanted.thinned:
        yield from thinned


def presence_of(
    history: History,
    id: CheckpointId,
    verdict: Judged,
    sealed: Sealed,
    *,
    every_copy: bool = True,
    sure: bool = False,
    path_of: Callable[[CheckpointId], str | None] | None = None,
) -> Presence | None:
    """Return where a checkpoint with good sealed bytes is, or None if it is gone.

    `path_of` is as in `History.current`, and `sure` as in `Wanted`.
    """
    run = history.run
    in_place, why = False, "the file in place is damaged"
    if verdict.outcome is Outcome.GOOD:
        with contextlib.suppress(RecordsError):  # a manifest that cannot be read may be of the files in place
            in_place = history.current(id.series, id.step, sealed.path, path_of=path_of) == id
        why = "it is no longer in place"
    there, unread, files = [], False, seen_when_sealed(sealed)
    try:
        there = [find_entry(run.storage, path) for path, *_ in files] if in_place else []
    except StorageError as error:
        if not is_unreadable(error):
            raise
        history.unread[id], unread = error, True
    entries = [e for e in there if e is not None and e.kind == "file"]
    in_place = unread or (in_place and [e.size for e in entries] == [size for _, size, *_ in files])
    changed = unread or (in_place and not looks_as_read(entries, sealed, verdict))
    if sure and changed:
        in_place, why = False, f"the file in place {'cannot be read' if unread else 'has changed since'}"
    asked = (every_copy or not in_place) and history.may_be_kept(id)
    copy = read_kept(run, id) if asked else None
    if copy is not None and not kept_matches(run, copy, sealed):
        copy = None
    at = verdict.checked_at
    if in_place:
        path, reason = run.usable(sealed.path), f"verified {at}, in place"
    elif copy is not None:
        path, reason = run.usable_record(copy.checkpoint_key), f"verified; {why}, so this is the kept copy"
    else:
        return None
    place = IN_PLACE if in_place else KEPT
    answer = KnownGood(path=path, id=id, kept=not in_place, verified_at=at, reason=reason, place=place)
    if sealed.thinned:
        answer = _as_thinned(answer, sealed)
    return Presence(answer=answer, in_place=in_place, changed=changed, copy=copy, entries=tuple(entries))
