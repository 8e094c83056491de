"""Damage or re-save? A sealed path holds other bytes than its manifest says. Pure; in doubt it is damage."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from ckptguard.checks.digests import same_content
from ckptguard.runs.file_signatures import is_new
from ckptguard.scan.result import ScannedFile
from ckptguard.values.manifest import Counter, File, Manifest, Span
from ckptguard.values.verdict import Facts

_STATE = 64  # bytes of floats from which a file's content is no coincidence
_WIPED = 16  # elements; a shorter tensor may well come to hold one value
_ONE_SAVE = 60 * 10**9  # nanoseconds between the files of one save, beyond what it took before
_GROWTH = 1e4  # beyond this factor over the largest weight before, numbers are no weights


class KnownBefore(msgspec.Struct, frozen=True, kw_only=True):
    """What was known of a generation before its files differed: whether it was ever GOOD, and the facts of its verdict.
    Only when they are asked for are read: the manifests of other steps, and whether its place was empty meanwhile."""

    ever_good: bool
    facts: Facts = Facts()
    other_contents: Callable[[], Sequence[Manifest]] = tuple
    was_gone: Callable[[], bool] = bool


class Change(enum.Enum):
    """How the content found differs from the content sealed."""

    SAME = "same"
    DAMAGED = "damaged"
    RESAVED = "resaved"  # a new generation
    RESAVING = "resaving"  # some files were written anew, others not yet


def classify_change(
    sealed: Manifest,
    found: Mapping[str, ScannedFile],
    past: KnownBefore,
    *,
    whole: bool,
    last_written: str,
    sealed_by_writer: bool,
    counters: Callable[[], Iterable[Counter]] = tuple,
) -> Change:
    """Compare the files found (by key), and the `counters` in them, with the manifest.

    It is a re-save if all of these hold:
    - Every file with tensors and the layout's last-written file are there and new, and the structure is `whole`.
    - No file has the content of another step of the `past`: a stale copy is damage.
    - No file has its old content still, for a run that was copied has new times everywhere. Excepted are contents that
      other steps have too, and files that were written along with the others (frozen weights).
    - Something vouches for a writer. Either an archive with checksums of its own, all of them right, holds anything
      else: rot would have broken one. Or a counter inside rose, and a float tensor differs. Or three and at least half
      of the float tensors differ. In the last two cases none of them may look wiped or scrambled: all one value where
      the facts of the `past` say otherwise, or grown beyond what an update does.

    A generation that never was GOOD has nothing to lose: there new files and a whole structure suffice. So they do
    where its place was empty meanwhile, unless they are a stale copy. Our own layout never writes over a name, so there
    every change is damage.
    """
    if all(f.path in found and same_content(f, found[f.path]) for f in sealed.files):
        return Change.SAME
    if sealed_by_writer:
        return Change.DAMAGED
    must_be_new = [f for f in sealed.files if f.tensors or (f.path == last_written)] or list(sealed.files)
    new = [f for f in must_be_new if _is_written(f, found.get(f.path))]
    if not any(f.path in found for f in new):
        return Change.DAMAGED  # files are gone, and nothing is being written
    if len(new) < len(must_be_new) or not whole:
        return _being_rewritten(new, found)
    if not past.ever_good:
        return Change.RESAVED
    others = [file for manifest in past.other_contents() for file in manifest.files]
    elsewhere = {_digests(f) for f in others if _has_floats(f)}
    changed = [f for f in sealed.files if f.path in found and not same_content(f, found[f.path])]
    if any(_digests(f) != found[f.path].span_digests in elsewhere for f in changed):
        return Change.DAMAGED  # a file with exactly the float tensors of another step: no training gives that
    if past.was_gone():
        return Change.RESAVED
    if any(f.spans and f.path not in found for f in sealed.files):
        return _being_rewritten(new, found)
    if _holds_old_file(sealed.files, found, elsewhere):
        return _being_rewritten([f for f in new if f.path not in found or not same_content(f, found[f.path])], found)
    if _vouched(changed, found, {f.checksums for f in (*others, *sealed.files)}):
        return Change.RESAVED
    differing = _differing(sealed.files, found)[0]
    # One harmed range wipes what lies inside it and cuts into two tensors at most: three or more are needed.
    many = differing > 2 and _most_tensors_differ(sealed.files, found)
    # One flipped bit may make a counter larger, but then no tensor differs.
    plausible = many or (differing > 0 and _counted_on(sealed.counters, counters()))
    return Change.RESAVED if plausible and not _looks_harmed(sealed.files, found, past.facts) else Change.DAMAGED


def _is_written(sealed: File, file: ScannedFile | None) -> bool:
    """Whether a file is new by its times (or gone). Where its own checksums are right another inode or etag will do."""
    if file is None or is_new(sealed, file.entry):
        return True
    pairs = ((sealed.inode, file.entry.inode), (sealed.etag, file.entry.etag))
    moved = any(a is not None and b is not None and a != b for a, b in pairs)
    return moved and file.structure.format == "torch_zip" and not file.structure.is_broken


def _counted_on(before: Iterable[Counter], now: Iterable[Counter]) -> bool:
    """Whether a counter rose, and none fell."""
    known = {c.kind: c.value for c in before}
    common = [(known[c.kind], c.value) for c in now if c.kind in known]
    return any(new > old for old, new in common) and all(new >= old for old, new in common)


def _being_rewritten(new: Sequence[File], found: Mapping[str, ScannedFile]) -> Change:
    """Whether all new files look like a writer's work, finished or not, instead of damage to the old bytes."""
    for sealed in new:
        file = found.get(sealed.path)
        if file is None or file.structure.truncated or not sealed.tensors:
            continue
        if file.structure.is_broken or not _most_tensors_differ([sealed], {sealed.path: file}):
            return Change.DAMAGED
    return Change.RESAVING


def _most_tensors_differ(sealed: Sequence[File], found: Mapping[str, ScannedFile]) -> bool:
    """More than one tensor, and at least half of all float tensors of more than one element."""
    differing, total = _differing(sealed, found)
    return differing > 1 and differing * 2 >= total


def _vouched(changed: Sequence[File], found: Mapping[str, ScannedFile], known: set[str]) -> bool:
    """Whether a whole archive that checks its own content holds another one than any that is `known`. Where a manifest
    of an older version does not say what it stated, another tensor tells."""
    archives = [f for f in changed if found[f.path].structure.format == f.format == "torch_zip"]
    return any(
        found[f.path].structure.checksums not in known if f.checksums else _differing([f], found)[0] > 0
        for f in archives
    )


def _looks_harmed(sealed: Sequence[File], found: Mapping[str, ScannedFile], facts: Facts) -> bool:
    """Whether a float tensor that changed is all one value now (a wiped page), or holds numbers that no update makes
    (scrambled bytes)."""
    largest = max(facts.largest_magnitude or 0.0, 1.0)
    before = {s.blake3 for f in sealed for s in f.spans}
    for file in found.values():
        for tensor, numbers in zip(file.structure.tensors, file.numbers, strict=True):
            if numbers is None or tensor.span is None or file.span_digests[tensor.span] in before:
                continue
            wiped = numbers.constant and numbers.count >= _WIPED and tensor.name not in facts.constant
            if wiped or numbers.largest > largest * _GROWTH:
                return True
    return False


def _differing(sealed: Sequence[File], found: Mapping[str, ScannedFile]) -> tuple[int, int]:
    """(float tensors of more than one element that differ, all of them)."""
    held = {digest for file in found.values() for digest in file.span_digests}
    spans = [span for file in sealed for span in _float_spans(file) if span.length > 8]
    return sum(span.blake3 not in held for span in spans), len(spans)


def _holds_old_file(sealed: Sequence[File], found: Mapping[str, ScannedFile], elsewhere: set[tuple[str, ...]]) -> bool:
    """Whether a file has its old float tensors, which no other step has, and was not written together with those that
    changed. Frozen weights that are saved again are written when the others are, and in the same order as before."""
    present = [f for f in sealed if f.path in found]
    kept = [f for f in present if _has_floats(f) and _digests(f) == found[f.path].span_digests]
    old = [f for f in kept if _digests(f) not in elsewhere]
    changed = [f for f in present if not same_content(f, found[f.path])]
    return any(f is not g and not _written_together(f, g, found) for f in old for g in changed)


def _written_together(old: File, changed: File, found: Mapping[str, ScannedFile]) -> bool:
    """Whether the times of two files fit one save by the writer of the sealed ones; unknown times do not."""
    times = (old.mtime_ns, changed.mtime_ns, found[old.path].entry.mtime_ns, found[changed.path].entry.mtime_ns)
    if any(time is None for time in times):
        return False
    before, now = (times[0] or 0) - (times[1] or 0), (times[2] or 0) - (times[3] or 0)
    in_order = before <= 0 or now >= 0
    return in_order and abs(now) <= 3 * abs(before) + _ONE_SAVE


def _float_spans(file: File) -> list[Span]:
    """Where each float tensor of a file lies."""
    floats = ("float", "bfloat", "complex")
    return [file.spans[t.span] for t in file.tensors if t.span is not None and t.dtype.startswith(floats)]


def _has_floats(file: File) -> bool:
    return sum(span.length for span in _float_spans(file)) > _STATE


def _digests(file: File) -> tuple[str, ...]:
    return tuple(span.blake3 for span in file.spans)
