"""Plan a rollback: which files move aside, and what each name holds afterwards. Pure.

The law: afterwards every name that the trainer may resume from holds known-good content, not newer than the known-good
checkpoint. Otherwise the name is refused, and nothing may be moved. Such names are fixed names (``last.pt``) and
pointers (``latest``, links). A trainer finds numbered checkpoints by searching, so newer ones are moved aside.

All folders of one training are treated alike, and no others are touched. A training writes a name to one place only.
So its folders are all folders below the largest one in which no name occurs twice. ``weights/last.pt`` and
``epochs/epoch_3.pt`` belong to one training, ``seed0/last.pt`` and ``seed1/last.pt`` to two.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from ckptguard.decisions.known_good import finest_common, kind_of_name
from ckptguard.decisions.names import read_names
from ckptguard.values.ids import CheckpointId, folder_of, series_of, training_named_in

_EPOCHS = ("epoch", "epoch in its name")  # several saves may share one


class Content(msgspec.Struct, frozen=True, kw_only=True):
    """The content that is, or was, at a path.

    `good`: its bytes are known-good and exist. `shape`: equal if the names, shapes, types and roles of all tensors are
    equal;
    None if unknown. `saved_at` is in ns by the storage's clock. `files`: its own, if it is no folder. `number` is what
    counts in its name where the id does not say it. `anew`: a training that began from scratch has written it.
    """

    id: CheckpointId
    path: str
    in_place: bool
    good: bool
    counters: Mapping[str, int] = {}
    has_optimizer: bool = False
    saved_at: int | None = None
    shape: Hashable = None
    files: tuple[str, ...] = ()
    number: tuple[int, ...] = ()
    anew: bool = False

    @property
    def order(self) -> tuple[tuple[int, ...], int]:
        """The sort key of the contents of a series, in the order of training."""
        numbers, generation = self.id.order
        return numbers or self.number, generation


class SeriesNow(msgspec.Struct, frozen=True, kw_only=True):
    """One series of the training that owns the known-good checkpoint.

    `lying` is its content at its paths, `good` its good content in place or kept, both newest first. `fixed` is its
    only path, if that is a fixed name. `last` is its newest sealed content. `target` is the content of the moment that
    is gone back to, if the series is saved together with others.
    """

    name: str
    fixed: str | None = None
    lying: tuple[Content, ...] = ()
    good: tuple[Content, ...] = ()
    ever_good: bool = False
    last: Content | None = None
    target: Content | None = None


class Pointer(msgspec.Struct, frozen=True, kw_only=True):
    """A link or a file that names a path. `leads`: a checkpoint exists there. `sure`: it certainly is a pointer. `far`:
    it can name a path in any folder. `file`: it names this file of the checkpoint, the one of another rank. `anew`: a
    training that began from scratch has saved there."""

    key: str
    names: str
    leads: bool
    sure: bool = True
    far: bool = False
    file: str = ""
    anew: bool = False


class Given(msgspec.Struct, frozen=True, kw_only=True):
    """A path, and the content to put there."""

    path: str
    content: Content


class Pointed(msgspec.Struct, frozen=True, kw_only=True):
    """A pointer, and the path that it names afterwards."""

    key: str
    path: str


class Mention(msgspec.Struct, frozen=True, kw_only=True):
    """A text that is no pointer, and a path in it that a rollback moves away. It is never changed."""

    key: str
    path: str


class RollbackPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to move aside, what to put back and which pointers to rewrite. Nothing good exists for the `refused`
    names."""

    moved: tuple[Content, ...] = ()
    given: tuple[Given, ...] = ()
    pointed: tuple[Pointed, ...] = ()
    refused: tuple[str, ...] = ()


def folders_of_training(folder: str, series: Collection[str]) -> frozenset[str]:
    """Return all folders of the training that saves into `folder`, given the names of all series. See the module's
    law."""
    around = folder
    found = frozenset((folder,))
    while True:
        below = [name for name in series if is_below(name, around)]
        if len({name.rpartition("/")[2] for name in below}) < len(set(below)):
            return found
        found |= {folder_of(name) for name in below}
        if not around:
            return found
        around = folder_of(around)


def is_below(path: str, folder: str) -> bool:
    """True if a path is inside a folder, at any depth."""
    return not folder or path.startswith(folder + "/")


def plan_rollback(known_good: Content, every: Sequence[SeriesNow], pointers: Iterable[Pointer] = ()) -> RollbackPlan:
    """Return the plan for a rollback to a known-good checkpoint. `every` holds all series of its training, its own
    too."""
    following = next_save(known_good, every)
    targets = {known_good.id.series: known_good}
    for series in every:
        not_newer = (c for c in series.good if not is_newer(c, known_good, following))
        target = series.target or next(not_newer, None)
        if target is not None:
            targets.setdefault(series.name, target)
    parts = [
        _of_numbers(series, known_good, targets.get(series.name), following)
        if series.fixed is None
        else _of_fixed_name(series, series.fixed, known_good, targets)
        for series in every
    ]
    files = RollbackPlan(
        moved=tuple(content for part in parts for content in part.moved),
        given=tuple(given for part in parts for given in part.given),
        refused=tuple(name for part in parts for name in part.refused),
    )
    return _with_pointers(files, known_good, every, targets, pointers)


def _of_numbers(series: SeriesNow, known_good: Content, target: Content | None, following: int | None) -> RollbackPlan:
    """Plan a series of numbered names: what is above its target goes, and the target comes back if it has gone. Without
    a target, what is newer and what may be resumed from goes: a search for the newest must not find a sick one."""

    def goes(content: Content) -> bool:
        too_new = content.anew or is_newer(content, known_good, following)
        if target is None:
            return too_new or (not content.good and _may_be_resumed(series, content, known_good))
        return content.anew or _above(content, target) or (content.id.step is None and too_new)

    moved = tuple(filter(goes, series.lying))
    if target is None or target.in_place or not (moved or target is known_good or target is series.target):
        return RollbackPlan(moved=moved)
    return RollbackPlan(moved=moved, given=(Given(path=target.path, content=target),))


def _of_fixed_name(series: SeriesNow, path: str, known_good: Content, targets: Mapping[str, Content]) -> RollbackPlan:
    """Plan a fixed name: it gets good content. If there is none, what may be resumed from is refused, and what else is
    not good, or newer, goes. So does a name that training from scratch has made."""
    target, lies = targets.get(series.name), next(iter(series.lying), None)
    if target is not None and target.in_place:
        return RollbackPlan()
    if series.target is None:
        target = _given_to(series, target, known_good, targets)
    if target is not None:
        return RollbackPlan(moved=series.lying, given=(Given(path=path, content=target),))
    if lies is None:
        return RollbackPlan()
    if _may_be_resumed(series, lies, known_good) and not (lies.anew and series.last is None):
        return RollbackPlan(refused=(path,))
    return RollbackPlan(moved=(lies,))


def _with_pointers(
    files: RollbackPlan,
    known_good: Content,
    every: Sequence[SeriesNow],
    targets: Mapping[str, Content],
    pointers: Iterable[Pointer],
) -> RollbackPlan:
    """Add the pointers: those that name what goes, what is not good or what counts further name their series' target.
    What is surely a pointer and cannot name it is refused."""
    back = {given.path for given in files.given}
    gone = {content.path for content in files.moved} - back
    stays = (c for s in every for c in s.lying if c.path not in gone | back)
    unsound = {c.path for c in stays if not c.good or counts_further(c, known_good)}
    pointed, refused = list[Pointed](), list(files.refused)
    for pointer in pointers:
        # An interrupted earlier rollback may have left this pointer without its target.
        lost = pointer.sure and not pointer.leads and pointer.names not in back
        wrong = pointer.names in gone or (pointer.names in unsound and pointer.leads)
        target = targets.get(series_of(pointer.names), known_good if wrong else None)
        wrong = wrong or (pointer.anew and target is not None and target.path != pointer.names)
        if not (lost or wrong) or target is None:
            continue
        path = _of_equal_rank(pointer.file, target) if pointer.file else target.path
        if path is not None and (pointer.far or folder_of(target.path) == folder_of(pointer.names)):
            pointed.append(Pointed(key=pointer.key, path=path))
        elif pointer.sure:
            refused.append(pointer.key)
    return replace(files, pointed=tuple(pointed), refused=tuple(refused))


def _of_equal_rank(file: str, target: Content) -> str | None:
    """Return the target's file of the rank that has written `file`; None if there is none."""
    readings = read_names((file, *target.files))
    wanted = readings[file].part
    return next((own for own in target.files if wanted is not None and readings[own].part == wanted), None)


def is_needed(
    plan: RollbackPlan,
    every: Iterable[SeriesNow],
    pointers: Iterable[Pointer],
    unfit: Collection[CheckpointId],
) -> bool:
    """True if a name that the plan changes or refuses holds something that is not good, or is `unfit`."""
    sound = {c.path for series in every for c in series.lying if c.good and c.id not in unfit}
    names_of = {pointer.key: pointer.names for pointer in pointers}
    changed = [*(c.path for c in plan.moved), *(g.path for g in plan.given), *(p.key for p in plan.pointed)]
    return any(names_of.get(path, path) not in sound for path in (*changed, *plan.refused))


def next_save(known_good: Content, every: Iterable[SeriesNow]) -> int | None:
    """Return when the first save after the known-good one of its series was made, or None if unknown."""
    own = (c for s in every if s.name == known_good.id.series for c in (*s.lying, *s.good) if not c.anew)
    return min((c.saved_at for c in own if c.order > known_good.order and c.saved_at is not None), default=None)


def counts_further(content: Content, known_good: Content) -> bool:
    """True if a counter inside the content is higher than the known-good one's, whatever its name says."""
    kind = finest_common(content.counters, known_good.counters)
    further = kind is not None and content.counters[kind] > known_good.counters[kind]
    return further and _of_one_training(content, known_good)


def is_newer(content: Content, known_good: Content, following: int | None) -> bool:
    """True if a content was saved after the known-good one.

    Another series is compared by the finest counter that both have. Without one, or at an equal epoch, save times
    decide.
    The save then belongs to the nearer of two: the known-good save or the one after it. In another folder, a higher
    counter with an earlier save time belongs to an earlier stage of the training. What is of another training by its
    name (``fold2``) is never newer: it goes back to its own newest good content.
    """
    if content.id.series == known_good.id.series:
        return content.order > known_good.order
    if not _of_one_training(content, known_good):
        return False
    one, other, kind = content.counters, known_good.counters, finest_common(content.counters, known_good.counters)
    if kind is not None and (one[kind] != other[kind] or kind not in _EPOCHS):
        return one[kind] > other[kind] and not (
            folder_of(content.id.series) != folder_of(known_good.id.series) and _saved_before(content, known_good)
        )
    if content.saved_at is None or known_good.saved_at is None or following is None:
        return False
    return content.saved_at - known_good.saved_at > following - content.saved_at


def _of_one_training(one: Content, other: Content) -> bool:
    return training_named_in(one.id.series) == training_named_in(other.id.series)


def _saved_before(one: Content, other: Content) -> bool:
    return one.saved_at is not None and other.saved_at is not None and one.saved_at < other.saved_at


def _above(content: Content, target: Content) -> bool:
    """True if something must move when its series goes back to the target: a later save, or a file at the target's
    path."""
    if content.path == target.path:
        return not target.in_place
    return content.order > target.order


def _given_to(
    series: SeriesNow, own: Content | None, known_good: Content, targets: Mapping[str, Content]
) -> Content | None:
    """Return what a fixed name gets: its own good content if it is recent enough. Otherwise it gets content of another
    series with the same shape, the known-good one first; never that of another model."""
    shape = series.last.shape if series.last is not None else None
    others = sorted(targets.values(), key=lambda c: (c is not known_good, c.id.step is None))
    alike = (c for c in others if shape is not None and c.shape == shape)
    found = next((c for c in alike if _may_replace(series.name, c)), None)
    if own is None or (found is known_good and is_newer(known_good, own, None)):
        return found or own
    return own


def _may_replace(name: str, content: Content) -> bool:
    """True if a training has saved a content that may go to another one of its names: what it says of itself, or either
    name, tells so. Bare weights as ``base.pt`` and ``chat.pt`` may be two models."""
    if training_named_in(name) != training_named_in(content.id.series):
        return False
    names_a_save = kind_of_name(name) or kind_of_name(content.id.series)
    return bool(names_a_save or content.has_optimizer or content.counters)


def _may_be_resumed(series: SeriesNow, lies: Content, known_good: Content) -> bool:
    """True if a trainer may resume from a content. If the known-good checkpoint holds optimizer state, only content
    with optimizer state counts. Otherwise any content counts that was ever good, which a dump of numbers never was, or
    that holds the same tensors."""
    last = series.last or lies
    is_alike = last.shape is not None and last.shape == known_good.shape
    return last.has_optimizer or ((series.ever_good or is_alike) and not known_good.has_optimizer)
