"""The plan of a rollback: what is moved aside, and what each name holds afterwards. Pure.

The law: afterwards every name that the trainer's own resume may read holds known-good content that is not newer than
the known-good checkpoint; or a name is refused, and nothing may be moved. Such names are fixed names (``last.pt``) and
pointers (``latest``, links); numbered ones are found by looking, and those that are newer go.

All folders of one training are treated alike, and no others are touched. The law by which they are told: a training
writes a name to one place. So a training has all folders below the largest one in which no name lies in two:
``weights/last.pt`` and ``epochs/epoch_3.pt`` are of one, ``seed0/last.pt`` and ``seed1/last.pt`` of two.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

import msgspec

from ckptguard.decisions.known_good import COUNTERS, NAMED
from ckptguard.values.ids import CheckpointId, folder_of, series_of

_EPOCHS = ("epoch", "epoch in its name")  # several saves may share one


class Content(msgspec.Struct, frozen=True, kw_only=True):
    """What lies, or lay, under a path. `good`: its bytes are known-good, and present. `shape`: equal where names,
    shapes, types and roles of all tensors are; None where nobody knows. `saved_at`: in ns, by the storage's clock."""

    id: CheckpointId
    path: str
    in_place: bool
    good: bool
    counters: Mapping[str, int] = {}
    has_optimizer: bool = False
    saved_at: int | None = None
    shape: Hashable = None


class SeriesNow(msgspec.Struct, frozen=True, kw_only=True):
    """A series of the training that the known-good checkpoint is of: what is `lying` there and what is `good` (in place
    or kept), the newest first. `fixed`: its one path, if its name is fixed and no other one of it lies there. `last` is
    its newest sealed content."""

    name: str
    fixed: str | None = None
    lying: tuple[Content, ...] = ()
    good: tuple[Content, ...] = ()
    ever_good: bool = False
    last: Content | None = None


class Pointer(msgspec.Struct, frozen=True, kw_only=True):
    """A link, or a file that holds a name, and the path that it names. `leads`: a checkpoint is there. `sure`: it is
    known to be a pointer. `far`: it can name what lies in any folder."""

    key: str
    names: str
    leads: bool
    sure: bool = True
    far: bool = False


class Given(msgspec.Struct, frozen=True, kw_only=True):
    """A name, and the content that it holds afterwards, which is put there."""

    path: str
    content: Content


class Pointed(msgspec.Struct, frozen=True, kw_only=True):
    """A pointer, and the path that it names afterwards."""

    key: str
    path: str


class RollbackPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is moved aside, what is given back, which pointers are written anew; and which names are `refused`, because
    nothing good is there that they could hold."""

    moved: tuple[Content, ...] = ()
    given: tuple[Given, ...] = ()
    pointed: tuple[Pointed, ...] = ()
    refused: tuple[str, ...] = ()


def folders_of_training(folder: str, series: Collection[str]) -> frozenset[str]:
    """All folders of the training that saves into one, by the names of all series; see above."""
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
    """True if something lies in a folder, at any depth."""
    return not folder or path.startswith(folder + "/")


def plan_rollback(known_good: Content, every: Sequence[SeriesNow], pointers: Iterable[Pointer] = ()) -> RollbackPlan:
    """The plan for going back to a known-good checkpoint. `every` series of its training is given, its own too."""
    following = next_save(known_good, every)

    def too_new(content: Content) -> bool:
        return is_newer(content, known_good, following)

    targets = {known_good.id.series: known_good}
    for series in every:
        target = next((c for c in series.good if not too_new(c)), None)
        if target is not None:
            targets.setdefault(series.name, target)
    moved: list[Content] = []
    given: list[Given] = []
    refused: list[str] = []
    for series in every:
        target = targets.get(series.name)
        if series.fixed is None:
            if target is not None:
                goes = [c for c in series.lying if _above(c, target) or (c.id.step is None and too_new(c))]
            else:  # nothing of it is good: whoever looks for its newest must not find what is sick
                goes = [
                    c for c in series.lying if too_new(c) or (not c.good and _may_be_resumed(series, c, known_good))
                ]
            moved += goes
            if target is not None and not target.in_place and (goes or target is known_good):
                given.append(Given(path=target.path, content=target))
            continue
        lies = next(iter(series.lying), None)
        if target is not None and target.in_place:
            continue
        target = _given_to(series, target, known_good, targets)
        if target is not None:
            moved += series.lying
            given.append(Given(path=series.fixed, content=target))
        elif lies is not None and _may_be_resumed(series, lies, known_good):
            refused.append(series.fixed)
        elif lies is not None:  # not good, or newer
            moved.append(lies)
    gone = {c.path for c in moved} - {g.path for g in given}
    back = {g.path for g in given}
    stays = (c for s in every for c in s.lying if c.path not in gone | back)
    unsound = {c.path for c in stays if not c.good or counts_further(c, known_good)}
    pointed = []
    for pointer in pointers:
        # What was moved aside before may have left a pointer to nothing, if that rollback was cut short.
        lost = pointer.sure and not pointer.leads and pointer.names not in back
        wrong = pointer.names in gone or (pointer.names in unsound and pointer.leads)
        target = targets.get(series_of(pointer.names), known_good if wrong else None)
        if not (lost or wrong) or target is None:
            continue
        if pointer.far or folder_of(target.path) == folder_of(pointer.names):
            pointed.append(Pointed(key=pointer.key, path=target.path))
        elif pointer.sure:
            refused.append(pointer.key)
    return RollbackPlan(moved=tuple(moved), given=tuple(given), pointed=tuple(pointed), refused=tuple(refused))


def next_save(known_good: Content, every: Iterable[SeriesNow]) -> int | None:
    """When the first save after the known-good one of its series was made, as far as that is known."""
    own = (c for s in every if s.name == known_good.id.series for c in (*s.lying, *s.good))
    return min((c.saved_at for c in own if c.id.order > known_good.id.order and c.saved_at is not None), default=None)


def counts_further(content: Content, known_good: Content) -> bool:
    """True if a content says by itself that training was further than at the known-good one, whatever its name says."""
    kind = _common(content, known_good)
    return kind is not None and content.counters[kind] > known_good.counters[kind]


def _common(content: Content, known_good: Content) -> str | None:
    """The finest counter that both have."""
    return next((k for k in (*COUNTERS, *NAMED) if k in content.counters and k in known_good.counters), None)


def is_newer(content: Content, known_good: Content, following: int | None) -> bool:
    """True if a content was saved after the known-good one. Of another series it is told by the finest counter that
    both have; where there is none, or only an equal epoch, by the order of saving: a save belongs to whichever is
    nearer in time, the known-good one or the one that followed it. In another folder what counts higher was saved later
    too, or it is of an earlier stage."""
    if content.id.series == known_good.id.series:
        return content.id.order > known_good.id.order
    one, other, kind = content.counters, known_good.counters, _common(content, known_good)
    if kind is not None and (one[kind] != other[kind] or kind not in _EPOCHS):
        return one[kind] > other[kind] and not (
            folder_of(content.id.series) != folder_of(known_good.id.series) and _saved_before(content, known_good)
        )
    if content.saved_at is None or known_good.saved_at is None or following is None:
        return False
    return content.saved_at - known_good.saved_at > following - content.saved_at


def _saved_before(one: Content, other: Content) -> bool:
    return one.saved_at is not None and other.saved_at is not None and one.saved_at < other.saved_at


def _above(content: Content, target: Content) -> bool:
    """True if something must go where this is gone back to: what was saved later, by its number or, where two names
    state one, by the order of saving; or what lies where the target belongs."""
    if content.path == target.path:
        return not target.in_place
    return content.id.order > target.id.order


def _given_to(
    series: SeriesNow, own: Content | None, known_good: Content, targets: Mapping[str, Content]
) -> Content | None:
    """What a fixed name is to hold: good content of its own; where there is none, or only an older one, that of another
    series of one shape with it, the known-good one first."""
    shape = series.last.shape if series.last is not None else None
    others = sorted(targets.values(), key=lambda c: (c is not known_good, c.id.step is None))
    found = next((c for c in others if shape is not None and c.shape == shape), None)
    if own is None or (found is known_good and is_newer(known_good, own, None)):
        return found or own
    return own


def _may_be_resumed(series: SeriesNow, lies: Content, known_good: Content) -> bool:
    """True if a trainer may resume from what a fixed name held: where the known-good holds an optimizer's state, only
    from what does. Without any, from what was good at some time: a dump of numbers never was."""
    last = series.last or lies
    return last.has_optimizer or (series.ever_good and not known_good.has_optimizer)
