"""Damage or re-save? Decide when a sealed path has other bytes than its manifest. Pure; in doubt it is damage."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from ckptguard.checks.digests import same_content
from ckptguard.formats.dtypes import BLOCKS, element_size
from ckptguard.runs.file_signatures import is_new, late_state
from ckptguard.scan.result import ScannedFile
from ckptguard.scan.span_pieces import differing_pieces, filled_pieces
from ckptguard.values.manifest import Counter, File, Manifest, Span
from ckptguard.values.verdict import Facts

_STATE = 64  # bytes of floats from which a file's content cannot be a coincidence
_WIPED = 16  # elements; a shorter tensor may well get a single value
_ONE_SAVE = 60 * 10**9  # nanoseconds between the files of one save, beyond the time that it took before
_GROWTH = 1e4  # numbers above this factor times the largest weight before are not weights
_GROWTH_OF_ONE = 1e2  # the same for one tensor and its own largest number
_WRITTEN = 16  # with this many different pieces or elements, only a writer can have changed all of them
_LOST = 64  # bytes in a row of zeros, or of ones, that no update makes


class KnownBefore(msgspec.Struct, frozen=True, kw_only=True):
    """What was known about a generation before its files differed: whether it was ever GOOD, and its verdict's facts.

    The manifests of other steps, and whether its path was empty meanwhile, are read only when needed.
    """

    ever_good: bool
    facts: Facts = Facts()
    other_contents: Callable[[], Sequence[Manifest]] = tuple
    was_gone: Callable[[], bool] = bool


class Change(enum.Enum):
    """How the content found differs from the sealed content."""

    SAME = "same"
    DAMAGED = "damaged"
    RESAVED = "resaved"  # a new generation
    GREW = "grew"  # the same files, and others with state that came late: a new generation of the whole
    RESAVING = "resaving"  # some files were written again, others not yet
    UNCLEAR = "unclear"  # a new generation or damage: nothing can decide


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

    It is a re-save if a writer has written the whole checkpoint: its files are new and `whole`, none of them is of
    another save, and their content is what a writer makes. Each of these three is a function below, and says more.

    Our own layout never overwrites a name, so there every change is damage. If the path was empty meanwhile, whatever
    is there now is a new save, unless a file is a stale copy. A generation that was never GOOD has nothing to lose: new
    files and a whole structure are enough.
    """
    if all(f.path in found and same_content(f, found[f.path]) for f in sealed.files):
        late = not sealed_by_writer and late_state(found, sealed, (file.entry for file in found.values()))
        return Change.GREW if late else Change.SAME
    if sealed_by_writer:
        return Change.DAMAGED
    files = _Files(sealed, found)
    if past.was_gone() and not files.hold_stale_copy(past.other_contents()):
        return Change.RESAVED
    unfinished = _unless_all_is_new(files, whole, last_written)
    if unfinished is not None:
        return unfinished
    if not past.ever_good:
        return Change.RESAVED
    others = past.other_contents()
    return _unless_of_one_save(files, others) or _by_content(files, others, past.facts, counters)


def holds_floats(manifest: Manifest) -> bool:
    """True if a file of it has floats whose change shows who made it."""
    return any(map(_has_floats, manifest.files))


class _Files:
    """The files of a manifest, and what was found under their names."""

    def __init__(self, sealed: Manifest, found: Mapping[str, ScannedFile]) -> None:
        self.sealed, self.counters, self.found = sealed.files, sealed.counters, found
        self.there = [f for f in sealed.files if f.path in found]
        self.changed = [f for f in self.there if not same_content(f, found[f.path])]

    def hold_stale_copy(self, others: Iterable[Manifest]) -> bool:
        """True if a file has exactly the float tensors of another step: no training does that."""
        elsewhere = {_digests(f) for manifest in others for f in manifest.files if _has_floats(f)}
        return any(_digests(f) != self.found[f.path].span_digests in elsewhere for f in self.there)

    def differing(self, sealed: Iterable[File]) -> tuple[list[int], int]:
        """Return the sizes of the float tensors of several elements that differ in some files, and how many such
        tensors these have. A tensor that is now in another file does not differ."""
        return _differing(sealed, self.found.values())

    def differing_pieces(self, sealed: File) -> list[list[bool]]:
        """Return for each span of a file which pieces differ, if it has pieces; empty if the file's layout changed."""
        now = self.found[sealed.path]
        tensors = [(t.name, t.dtype, t.shape, t.span) for t in sealed.tensors]
        places = [(s.offset, s.length) for s in sealed.spans]
        known = len(sealed.pieces) == len(now.pieces) == len(sealed.spans)
        if (
            not known
            or tensors != [(t.name, t.dtype, t.shape, t.span) for t in now.structure.tensors]
            or places != [(s.offset, s.length) for s in now.structure.spans]
        ):
            return []
        return [differing_pieces(*both) for both in zip(sealed.pieces, now.pieces, strict=True)]


def _differing(sealed: Iterable[File], now: Iterable[ScannedFile]) -> tuple[list[int], int]:
    held = {digest for file in now for digest in file.span_digests}
    spans = [(span, size) for file in sealed for span, size in _float_spans(file) if span.length > 8]
    return [span.length // size for span, size in spans if span.blake3 not in held], len(spans)


def _unless_all_is_new(files: _Files, whole: bool, last_written: str) -> Change | None:
    """Return None if every file with tensors and the layout's last-written file are new, and all of it is whole.

    Otherwise it is being written again, if what is new looks like a writer's work. If nothing new is there, files are
    missing.
    """
    must_be_new = [f for f in files.sealed if f.tensors or f.path == last_written] or list(files.sealed)
    new = [f for f in must_be_new if _is_written(f, files.found.get(f.path))]
    if not any(f.path in files.found for f in new):
        return Change.DAMAGED
    return _being_rewritten(files, new) if len(new) < len(must_be_new) or not whole else None


def _is_written(sealed: File, file: ScannedFile | None) -> bool:
    """True if a file is new by its times, or gone. With right checksums of its own, another inode or etag is enough."""
    if file is None or is_new(sealed, file.entry):
        return True
    pairs = ((sealed.inode, file.entry.inode), (sealed.etag, file.entry.etag))
    moved = any(a is not None and b is not None and a != b for a, b in pairs)
    return moved and _checks_itself(file) and not file.structure.is_broken


def _checks_itself(file: ScannedFile) -> bool:
    """True if a file is an archive that states checksums of all of its content."""
    return file.structure.format == "torch_zip" or file.structure.checksums != ""


def _being_rewritten(files: _Files, new: Iterable[File]) -> Change:
    """Return RESAVING if all new files look like a writer's work, finished or not; otherwise DAMAGED. In a finished one
    more than one, and at least half, of the float tensors with several elements differ."""
    for sealed in new:
        file = files.found.get(sealed.path)
        if file is None or file.structure.truncated or not sealed.tensors:
            continue
        # What the other files hold says nothing here: the files of other ranks may have the same tensors, still old.
        differing, total = _differing([sealed], [file])
        if file.structure.is_broken or len(differing) < 2 or len(differing) * 2 < total:
            return Change.DAMAGED
    return Change.RESAVING


def _unless_of_one_save(files: _Files, others: Sequence[Manifest]) -> Change | None:
    """Return None if all files are of one new save: no file has the content of another step, which would be a stale
    copy, and none still has its old content.

    A copied run has new times everywhere. So old content counts, but for contents that other steps have, too, and for
    files that were written along with the others (frozen weights).
    """
    if files.hold_stale_copy(others):
        return Change.DAMAGED
    new = [f for f in files.sealed if f.tensors]
    if any(f.spans and f.path not in files.found for f in files.sealed):
        return _being_rewritten(files, new)
    elsewhere = {_digests(f) for manifest in others for f in manifest.files if _has_floats(f)}
    kept = [f for f in files.there if _has_floats(f) and _digests(f) == files.found[f.path].span_digests]
    old = [f for f in kept if _digests(f) not in elsewhere]
    if any(f is not g and not _written_together(f, g, files.found) for f in old for g in files.changed):
        return _being_rewritten(files, [f for f in new if f.path not in files.found or f in files.changed])
    return None


def _written_together(old: File, changed: File, found: Mapping[str, ScannedFile]) -> bool:
    """True if the times of two files fit one save by the writer of the sealed ones. Unknown times do not. Frozen
    weights are saved again together with the others, in the same order as before."""
    times = (old.mtime_ns, changed.mtime_ns, found[old.path].entry.mtime_ns, found[changed.path].entry.mtime_ns)
    if any(time is None for time in times):
        return False
    before, now = (times[0] or 0) - (times[1] or 0), (times[2] or 0) - (times[3] or 0)
    in_order = before <= 0 or now >= 0
    return in_order and abs(now) <= 3 * abs(before) + _ONE_SAVE


def _by_content(
    files: _Files, others: Iterable[Manifest], facts: Facts, counters: Callable[[], Iterable[Counter]]
) -> Change:
    """Return RESAVED if something in the content proves a writer.

    - An archive whose own checksums are right has other content, which decay would have broken.
    - Or a counter inside rose, and a float tensor differs.
    - Or at least three and half of the float tensors differ, in 16 or more elements.
    - Or each differing float tensor differs all over, together in 16 or more pieces, and every file with floats has
      one. Decay changes one place.

    Except for archives, none of them may look wiped or scrambled. Signs are a single value, unlike in the `facts`, and
    growth beyond any update.

    It is UNCLEAR if fewer pieces differ, but all of them: a tensor of a few elements. So is a tensor with unchanged
    parts here and there, and most tensors with an unchanged end. A difference in one place is damage, even if a user
    made it: a bit, a byte, a row, a torn end.
    """
    known = [*(file for manifest in others for file in manifest.files), *files.sealed]
    if _vouched(files, {f.checksums for f in known}):
        return Change.RESAVED
    differing, total = files.differing(files.sealed)
    # One damaged range wipes what is inside it and cuts into two tensors at most. So three or more are needed, and more
    # elements than a torn write of a few words damages.
    many = len(differing) > 2 and len(differing) * 2 >= total and sum(differing) >= _WRITTEN
    # One flipped bit may make a counter larger, but then no tensor differs.
    plausible = many or (differing != [] and _counted_on(files.counters, counters()))
    if _looks_harmed(files, facts):
        return Change.DAMAGED
    torn = any(_is_one_place(files.differing_pieces(f)) for f in files.changed)
    if plausible:
        return Change.UNCLEAR if torn else Change.RESAVED
    if torn or any(_float_spans(f) for f in files.sealed if f not in files.changed):
        return Change.DAMAGED
    return _by_pieces(files, {s.blake3 for f in known for s in f.spans if s.length >= _WRITTEN})


def _vouched(files: _Files, known: set[str]) -> bool:
    """True if a whole archive that checks its own content has content that is not `known`.

    A manifest of an older version lacks the archive's checksums: then a different tensor shows it.
    """
    for sealed in files.changed:
        now = files.found[sealed.path]
        if now.structure.format == sealed.format and _checks_itself(now):
            is_other = now.structure.checksums not in known if sealed.checksums else files.differing([sealed])[0] != []
            if is_other:
                return True
    return False


def _counted_on(before: Iterable[Counter], now: Iterable[Counter]) -> bool:
    """True if a counter rose, and none fell."""
    known = {c.kind: c.value for c in before}
    common = [(known[c.kind], c.value) for c in now if c.kind in known]
    return any(new > old for old, new in common) and all(new >= old for old, new in common)


def _looks_harmed(files: _Files, facts: Facts) -> bool:
    """True if a changed float tensor is now a single value, holds the content of a lost page, or has impossible
    numbers."""
    most = max(facts.largest_magnitude or 0.0, 1.0) * _GROWTH
    before = {s.blake3 for f in files.sealed for s in f.spans}
    for file in files.found.values():
        for tensor, numbers in zip(file.structure.tensors, file.numbers, strict=True):
            if numbers is None or tensor.span is None or file.span_digests[tensor.span] in before:
                continue
            one_value = numbers.constant and numbers.nan < numbers.count  # NaN everywhere is sick, not wiped
            wiped = one_value and numbers.count >= _WIPED and tensor.name not in facts.constant
            if wiped or (numbers.largest > most and numbers.count > 1):  # a single number may be a counter
                return True
    return any(
        _lost_bytes(file, number, files.found[file.path], differ) or _grew(file, number, files.found[file.path])
        for file in files.changed
        for number, differ in enumerate(files.differing_pieces(file))
        if any(differ)
    )


def _lost_bytes(sealed: File, number: int, now: ScannedFile, differ: Sequence[bool]) -> bool:
    """True if the differences in a span are the content of a lost page: in most pieces, or in many bytes."""
    dtype = next((t.dtype for t in sealed.tensors if t.span == number), None)
    filled = filled_pieces(sealed.spans[number].length, element_size(dtype), now.pieces[number]) if dtype else []
    lost = [size if differs else 0 for size, differs in zip(filled, differ, strict=False)]
    runs = [sum(run) for _, run in itertools.groupby(lost, key=bool)]
    return sum(map(bool, lost)) * 2 >= sum(differ) or max(runs, default=0) >= _LOST


def _grew(sealed: File, number: int, now: ScannedFile) -> bool:
    """True if a tensor of a span has numbers that no update gives. A single number may be a counter."""
    largest = {t.name: t.largest or 0.0 for t in sealed.tensors if t.span == number}
    return any(
        numbers is not None and numbers.count > 1 and numbers.largest > max(largest[tensor.name], 1.0) * _GROWTH_OF_ONE
        for tensor, numbers in zip(now.structure.tensors, now.numbers, strict=True)
        if tensor.span == number
    )


def _by_pieces(files: _Files, known: set[str]) -> Change:
    """Judge a few tensors, or a minority: each must differ all over, and none may be `known`."""
    every: list[Sequence[bool]] = []
    for file in filter(_float_spans, files.changed):
        spans, digests = files.differing_pieces(file), files.found[file.path].span_digests
        moved = any(any(differ) and digest in known for differ, digest in zip(spans, digests, strict=False))
        if not spans or moved or not all(_is_all_over(differ) for differ in spans if any(differ)):
            return Change.DAMAGED
        every += spans
    differing, pieces = sum(map(sum, every)), sum(map(len, every))
    if differing < 2 and not differing == pieces == 1:
        return Change.DAMAGED
    patchy = any(any(differ) and not all(differ) for differ in every)
    return Change.RESAVED if differing >= _WRITTEN and not patchy else Change.UNCLEAR


def _is_one_place(spans: Sequence[Sequence[bool]]) -> bool:
    """True if all differences are in a row that begins or ends inside a tensor."""
    runs = sum(differs for differs, _ in itertools.groupby(itertools.chain.from_iterable(spans)))
    return runs == 1 and any(any(differ) and not all(differ) for differ in spans)


def _is_all_over(differ: Sequence[bool]) -> bool:
    """True if all pieces of a span differ, or half of them in at least three places."""
    places = sum(differs for differs, _ in itertools.groupby(differ))
    return all(differ) or (places >= 3 and sum(differ) * 2 >= len(differ))


def _float_spans(file: File) -> list[tuple[Span, int]]:
    """Return where each float tensor of a file is, and the size of one element."""
    floats = ("float", "bfloat", "complex")
    return [
        (file.spans[t.span], element_size(t.dtype))
        for t in file.tensors
        if t.span is not None and (t.dtype.startswith(floats) or t.dtype in BLOCKS)
    ]


def _has_floats(file: File) -> bool:
    return sum(span.length for span, _ in _float_spans(file)) > _STATE


def _digests(file: File) -> tuple[str, ...]:
    return tuple(span.blake3 for span in file.spans)
