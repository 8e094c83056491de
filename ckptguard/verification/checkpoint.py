"""Verify checkpoints of a run, in place or as kept copies: read every byte of each once, judge, record."""

from __future__ import annotations

import contextlib
import enum
import threading
import weakref
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence

import msgspec

from ckptguard.checks import Evidence, facts_of, is_bad_alone, run_checks
from ckptguard.checks.digests import same_content
from ckptguard.checks.evidence import NO_SUMS, FoundSums, KnownFacts
from ckptguard.checks.order import counters_of
from ckptguard.checks.schema import QUESTION, UNCLEAR_SAVE
from ckptguard.checks.stale import has_rested
from ckptguard.decisions.turns import LARGE
from ckptguard.errors import (
    BusyError,
    ChangedWhileReadError,
    ChecksumFileError,
    CouldNotTellError,
    DeniedError,
    RecordsError,
    ResavingError,
    StorageFullError,
)
from ckptguard.keep.copies import put_aside, release
from ckptguard.layouts import LAYOUTS, Checkpoint, find_checkpoints
from ckptguard.layouts.own import OPTIMIZER_FILE
from ckptguard.records.after_seal import note_ctimes, read_late_md5s, record_late_md5s
from ckptguard.records.emptied import was_emptied
from ckptguard.records.kept import KeptCopy, read_kept
from ckptguard.records.run_settings import allow_nonfinite, allowed_nonfinite
from ckptguard.records.trash import MOVED, read_trashed
from ckptguard.records.who_and_when import utc_now
from ckptguard.runs.file_signatures import other_ctimes, signature_seen
from ckptguard.runs.history import History
from ckptguard.runs.lock import run_lock
from ckptguard.runs.publish import Place
from ckptguard.runs.results import Checked, checked
from ckptguard.runs.run_view import RunView
from ckptguard.runs.sealed_content import is_untouched, sealed_outcome
from ckptguard.runs.work import PLAIN, Work
from ckptguard.scan import ScanOptions
from ckptguard.scan.result import Scan
from ckptguard.values.ids import CheckpointId, escape
from ckptguard.values.manifest import Manifest, Seen, identity
from ckptguard.values.record_formats import VERDICT
from ckptguard.values.verdict import (
    PLUGIN,
    SEAL_OF_WRITER,
    UNDERSTOOD,
    Facts,
    Finding,
    Outcome,
    Severity,
    Verdict,
    is_clearance,
    judge,
    limit_findings,
    why,
)
from ckptguard.verification.collect_evidence import (
    collect_evidence,
    copy_differs,
    gaps_of,
    manifest_files,
    read_by_plugins,
    scan_checkpoint,
)
from ckptguard.verification.damage_or_resave import Change, KnownBefore, classify_change, holds_floats
from ckptguard.verification.found_sums import find_sums
from ckptguard.verification.seal import seal_observed
from ckptguard.version import __version__


class Resave(enum.Enum):
    """What to do about a sealed checkpoint of which some files were saved again and others were not."""

    JUDGE = "judge"  # it is not a whole checkpoint: BAD
    WAIT = "wait"  # raise ResavingError: it may still be completed
    GIVE_UP = "give up"  # INCOMPLETE, unless it is completed later


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """How a checkpoint is verified.

    - `record`: write the verdict to the ledger.
    - `md5`: compute MD5, too, unless the settings omit it where it is recorded.
    - `resealed`: treat the files as a new generation, whatever the manifest says.
    - `was_gone`: its path was empty at some time since the last verdict.
    - `reference`: the schema to match, instead of the run's own.
    - `notes`: findings to add to the verdict.
    - `trusted`: the program that has just written the files says that they are as they should be.
    - `alone`: saves before it have no verdict. So it is compared with none, and is BAD, or could not be judged.
    """

    record: bool = True
    md5: bool = True
    resealed: bool = False
    was_gone: bool = False
    resave: Resave = Resave.JUDGE
    reference: Manifest | None = None
    notes: tuple[Finding, ...] = ()
    trusted: bool = False
    alone: bool = False


FULLY = Verification()
NEW_GENERATION = (Change.RESAVED, Change.GREW, Change.UNCLEAR)
_UNCLEAR = (
    "it differs from what was verified before, and too little of it differs to distinguish a new save from damage."
    " If it was saved again, run: ckptguard clear RUN CHECKPOINT"
)
_RACES = 4  # other processes may seal the same checkpoint meanwhile; then try again
_ASKED_AGAIN = (QUESTION, UNDERSTOOD, PLUGIN)
_SAVES = 4  # earlier ones that a file may belong to
_MOST_HELD = 16 * 1024**2  # bytes of what was read early, packed; in memory up to seven times as much
_OTHERS = 20  # neighbours by step whose content a file may be a stale copy of


def verify_checkpoint(
    view: RunView,
    checkpoint: Checkpoint,
    how: Verification = FULLY,
    *,
    work: Work = PLAIN,
    early: EarlyRead | None = None,
) -> Checked:
    """Verify a checkpoint in place now, and record the verdict, in the steps of docs/explain/verdict.md: all bytes are
    read once, compared with what is sealed, checked and judged. The caller has waited until its files are quiet. What
    was read `early` is not read again, if that is still what is there.

    After reading, only its own files are listed again, and its series' record names. Raises CouldNotTellError and its
    kinds if there can be no verdict: a file changed or vanished meanwhile, storage failed, or the scanning process
    died.
    """
    read = _read(view, checkpoint, how, work, early)
    for race in range(_RACES):
        view.refresh(checkpoint.series, just_listed=race == 0)
        try:
            content = _content_of(view, checkpoint, read, how)
            found = judge_and_record(view, checkpoint, read, how, content)
        except BusyError:
            continue
        except _HalfThinnedError:
            from ckptguard.retention.trash import settle_trash  # few are thinned

            with run_lock(view.run):
                settle_trash(view.run)
            view.forget()
            return verify_checkpoint(view, view.look_again(checkpoint.path) or checkpoint, how, work=work)
        if how.record and content.sealed is not None and content.change is not Change.SAME:
            _confirm_kept(view, content.sealed, work)
        return found
    raise CouldNotTellError(f"other processes kept sealing {checkpoint.path} at the same time")


class _HalfThinnedError(CouldNotTellError):
    """A thinning was killed before all its files had changed places, or goes on."""


def _is_half_thinned(checkpoint: Checkpoint, sealed: Manifest) -> bool:
    anew = {path for path, *_ in sealed.thinned if sealed.file(path) is not None}
    return any(e.key in anew and (e.key, *e.signature) in sealed.thinned for e in checkpoint.entries)


def read_early(
    view: RunView, checkpoint: Checkpoint, *, was_gone: bool = False, work: Work = PLAIN
) -> Checked | EarlyRead:
    """Read a checkpoint before its turn, while earlier saves of its series have no verdict. It is BAD at once, and
    recorded, if its own bytes make it so. Every other verdict needs what is recorded about the saves before it.

    Raises as `verify_checkpoint` does.
    """
    how = Verification(resave=Resave.WAIT, was_gone=was_gone)
    beside = _lists_beside(view, checkpoint)  # before it is read: what comes meanwhile was not used
    read = _read(view, checkpoint, how, work)
    early = EarlyRead(beside=beside, read=read)
    content = _content_of(view, checkpoint, read, how)
    evidence = _evidence(view, checkpoint, read, how, content)
    if is_bad_alone(evidence) and not view.history.has_verdict(content.id):
        alone = msgspec.structs.replace(how, alone=True)
        return verify_checkpoint(view, checkpoint, alone, work=work, early=early)
    findings = _findings(view, evidence, how, content)
    good = judge(findings, sealed=content.sealed is not None) is Outcome.GOOD
    return _hold(early if good else msgspec.structs.replace(early, doubt=why(findings, most=1)))


def judge_in_run(view: RunView, how: Verification, notes: list[str], work: Work) -> Callable[[Checkpoint], Checked]:
    """Return a function that verifies checkpoints through a run's view. It adds to `notes` what could not be
    recorded."""
    if how.record and view.settings.allow_nonfinite:
        try:
            allow_nonfinite(view.run, view.settings.allow_nonfinite)
        except CouldNotTellError as error:
            notes.append(f"the pattern could not be saved in the run's settings: {error.message}")

    def judge(checkpoint: Checkpoint) -> Checked:
        nonlocal how
        try:
            return verify_checkpoint(view, checkpoint, how, work=work)
        except (DeniedError, StorageFullError) as error:
            # Reading works but recording does not: a read-only run, or one on a full disk, still gets its result.
            unrecorded = msgspec.structs.replace(how, record=False)
            found = verify_checkpoint(view, checkpoint, unrecorded, work=work)
            notes.append(f"verdicts could not be recorded: {error.message}")
            how = unrecorded  # the next one could not be recorded, either
            return found

    return judge


def spares_md5(view: RunView, size: int, work: Work) -> bool:
    """True if a first verdict beside training does without MD5, which takes four times as long as all the rest."""
    return view.settings.digest != "md5" and work.yield_for is not None and size > LARGE


def _md5_is_recorded(view: RunView, checkpoint: Checkpoint) -> bool:
    """True if an earlier pass computed the MD5 of every current file, as far as storage reports.

    Later files do not count.
    """
    id = view.current(checkpoint)
    sealed = view.history.manifest(id) if id is not None else None
    if id is None or sealed is None:
        return False
    present = {entry.key: entry.signature for entry in checkpoint.entries}
    if any(present.get(f.path) != f.signature for f in sealed.files):
        return False
    return all(f.md5 for f in sealed.files) or bool(read_late_md5s(view.run, id))


class Read(msgspec.Struct, frozen=True):
    """The pass over a checkpoint's bytes, and what checksum files state about them. `md5`: it took MD5, too."""

    scan: Scan
    sums: FoundSums
    md5: bool


class EarlyRead(msgspec.Struct, frozen=True, kw_only=True, weakref=True, eq=False):
    """What was read of a checkpoint before its turn. It is not a verdict, and lives in memory alone.

    - `beside`: the checksum files beside it.
    - `read`: None if too much was held already. Then it is read again in its turn.
    - `doubt`: why it may not be good, by what was on record then. None: nothing wrong was found.
    """

    beside: tuple[tuple[object, ...], ...]
    read: Read | None
    doubt: str | None = None

    def is_of(self, checkpoint: Checkpoint, beside: tuple[tuple[object, ...], ...]) -> bool:
        """True if what was read is what is there now, as far as storage reports. A file that was written since has
        another ctime, even if its time was set back."""
        read = [(f.entry.key, f.entry.size, f.entry.ctime_ns) for f in self.read.scan.files] if self.read else None
        return self.beside == beside and [(e.key, e.size, e.ctime_ns) for e in checkpoint.entries] == read

    @property
    def words(self) -> str:
        """What to say of the checkpoint until it has its verdict."""
        found = "nothing wrong was found" if self.doubt is None else f"it may not be good ({self.doubt})"
        return f"it was read early, and {found}; its verdict comes after those of the saves before it"


_held: weakref.WeakKeyDictionary[EarlyRead, int] = weakref.WeakKeyDictionary()
_holding = threading.Lock()


def _lists_beside(view: RunView, checkpoint: Checkpoint) -> tuple[tuple[object, ...], ...]:
    return tuple((entry.key, *entry.signature) for entry in view.sum_lists_beside(checkpoint))


def _hold(early: EarlyRead) -> EarlyRead:
    """Return it without what was read if this process already holds too much."""
    size = len(msgspec.msgpack.encode(early.read))
    with _holding:
        if size + sum(_held.values()) > _MOST_HELD:
            return msgspec.structs.replace(early, read=None)
        _held[early] = size
    return early


class ReadContent(msgspec.Struct, frozen=True):
    """What was read: its generation, its manifest if it is sealed, and how the files differ from it.

    `grew_from` is the generation of the same files before others with state were added.
    """

    id: CheckpointId
    sealed: Manifest | None = None
    change: Change = Change.SAME
    grew_from: CheckpointId | None = None


def _read(view: RunView, checkpoint: Checkpoint, how: Verification, work: Work, early: EarlyRead | None = None) -> Read:
    """Read all bytes once. Raises ChangedWhileReadError if its files are no longer those that were listed."""
    read = early.read if early is not None else None
    now = view.look_again(checkpoint.path) if read is not None else checkpoint
    if read is None or early is None or now is None or not early.is_of(now, _lists_beside(view, now)):
        md5 = how.md5 and not spares_md5(view, checkpoint.bytes, work)
        if md5 and view.settings.digest == "blake3" and not how.resealed:
            md5 = not _md5_is_recorded(view, checkpoint)
        sums = find_sums(view.run.storage, checkpoint, view.sum_lists_beside(checkpoint))
        options = sums.added_to(ScanOptions(md5=md5, yield_for=work.yield_for))
        read = Read(scan_checkpoint(view.run.storage, checkpoint, options, work, view.settings), sums, md5)
        now = view.look_again(checkpoint.path)
    if now is None or now.signature != checkpoint.signature:
        raise ChangedWhileReadError(f"{checkpoint.path} changed while it was read", key=checkpoint.path)
    return read


def _content_of(view: RunView, checkpoint: Checkpoint, read: Read, how: Verification) -> ReadContent:
    """Say which generation was read: the sealed one, even if it is damaged now, or a new save."""
    id = None if how.resealed else view.current(checkpoint)
    sealed = view.history.manifest(id) if id is not None else None
    if id is None or sealed is None:
        return ReadContent(view.new_id(checkpoint) if id is None else id)
    if sealed.thinned and _is_half_thinned(checkpoint, sealed):
        raise _HalfThinnedError(f"{checkpoint.path} is being thinned")
    change = change_of(view, checkpoint, read.scan, sealed, was_gone=how.was_gone)
    if change is Change.RESAVING and how.resave is Resave.WAIT:
        raise ResavingError(f"{checkpoint.path} is being saved again", key=checkpoint.path)
    if change not in NEW_GENERATION:
        return ReadContent(id, sealed, change)
    for one in read.sums.stated:
        if one.earlier and one.differs(read.scan):
            raise ChecksumFileError(
                f"the checksum file {one.source} is older than {escape(one.file)}, and not about it"
            )
    return ReadContent(view.new_id(checkpoint), change=change, grew_from=id if change is Change.GREW else None)


def judge_and_record(
    view: RunView, checkpoint: Checkpoint, read: Read, how: Verification, content: ReadContent
) -> Checked:
    """Check what was read, judge it, and record the verdict. Raises BusyError if another process sealed it."""
    evidence = _evidence(view, checkpoint, read, how, content)
    findings = _findings(view, evidence, how, content)
    outcome = judge(findings, sealed=content.sealed is not None)
    if how.alone and (outcome is not Outcome.BAD or view.history.has_verdict(content.id)):
        raise ChangedWhileReadError(f"{checkpoint.path} changed after it was read", key=checkpoint.path)
    if content.change is Change.RESAVING and how.resave is Resave.GIVE_UP:
        outcome = Outcome.INCOMPLETE
    sealed = _recorded(view, evidence, read, content, findings, outcome) if how.record else content.sealed
    named = content.id if how.record or sealed else None
    return checked(checkpoint, named, outcome, sealed=sealed, seconds=read.scan.seconds, findings=findings)


def _evidence(view: RunView, checkpoint: Checkpoint, read: Read, how: Verification, content: ReadContent) -> Evidence:
    """Gather what the checks need: what was read, and what the run's records and settings say."""
    history, settings, id, scan = view.history, view.settings, content.id, read.scan
    manifest, verdict = how.reference, None
    if manifest is None:
        sizes = {entry.key: entry.size for entry in checkpoint.entries}
        manifest, verdict = history.reference(id, sizes) or (None, None)
    thinned = content.sealed.thinned if content.sealed is not None else _left_out(checkpoint, scan)
    if content.grew_from is not None:
        thinned = _taken_from(history, checkpoint, content.grew_from)
    if thinned:
        from ckptguard.layouts.thinning import without_resume_state  # few are

        manifest = without_resume_state(manifest) if manifest is not None else None
        checkpoint, scan = _without_leftovers(checkpoint, scan, thinned)
    before = history.verdict(id)
    said = () if before is None else (f for f in before.findings if f.check == UNDERSTOOD)
    previous, previous_facts = (None if how.alone else history.previous(id.series, id.step)) or (None, None)
    said_of = history.current_verdict(previous.id) if previous is not None else None
    if previous is not None and previous_facts is not None and said_of and said_of.outcome is Outcome.BAD:
        before_it = history.previous(id.series, previous.step)  # it may have been judged alone
        rested = previous_facts.stale or (before_it is not None and has_rested(previous, before_it[0]))
        previous_facts = msgspec.structs.replace(previous_facts, stale=rested)
    known = KnownFacts(
        sealed=content.sealed,
        reference=manifest,
        reference_facts=verdict.facts if verdict is not None else None,
        must_match=how.reference is not None,
        previous=previous,
        previous_facts=previous_facts,
        saves=history.good_before(id, _SAVES) if len(checkpoint.files) > 1 and not how.alone else (),
        following=None if how.alone else history.following(id.series, id.step, read=content.sealed is None),
        allow_nonfinite=(*settings.allow_nonfinite, *allowed_nonfinite(view.run)),
        trust_globals=settings.trust_globals,
        trusted=how.trusted or any(f.severity is Severity.NOTICE for f in said),
        sums=read.sums,
        thinned=thinned,
    )
    return collect_evidence(view.run.storage, checkpoint, scan, known)


def _left_out(checkpoint: Checkpoint, scan: Scan) -> tuple[Seen, ...]:
    """Return the optimizer's file, if a guard left it out or thinning took it, as what is there says: the manifest is
    lost."""
    own = (file.structure for file in scan.files if file.structure.format == "ckptguard_state")
    where = next((structure.metadata.get("optimizer") for structure in own), None)
    lost, names = f"{checkpoint.path}/{OPTIMIZER_FILE}", (t.name for file in scan.files for t in file.structure.tensors)
    lacks = where == "nowhere" and not any(name.startswith("optimizer") for name in names)
    is_lost = lacks or (where == "in a file" and lost not in checkpoint.files)
    return ((lost, 0, None, None, None),) if is_lost else ()


def _taken_from(history: History, checkpoint: Checkpoint, id: CheckpointId) -> tuple[Seen, ...]:
    """Return the files that thinning took from what a checkpoint grew from. A file that was added does not make it
    whole again, unless it is one of these."""
    before = history.manifest(id)
    gone = (one for one in before.thinned if before.file(one[0]) is None) if before is not None else ()
    taken = {path: tuple(signature) for path, *signature in gone}
    back = any(taken.get(entry.key, entry.signature) != entry.signature for entry in checkpoint.entries)
    return before.thinned if before is not None and not back else ()


def _without_leftovers(checkpoint: Checkpoint, scan: Scan, thinned: Collection[Seen]) -> tuple[Checkpoint, Scan]:
    """Return a thinned checkpoint and its scan without the files that were not taken away yet: they count for
    nothing."""
    left = {entry.key for entry in checkpoint.entries if (entry.key, *entry.signature) in thinned}
    entries = tuple(entry for entry in checkpoint.entries if entry.key not in left)
    files = tuple(file for file in scan.files if file.entry.key not in left)
    return msgspec.structs.replace(checkpoint, entries=entries), msgspec.structs.replace(scan, files=files)


def _findings(view: RunView, evidence: Evidence, how: Verification, content: ReadContent) -> list[Finding]:
    """Return what the checks find, and what earlier verdicts on the same content add."""
    history, findings = view.history, run_checks(evidence, alone=how.alone)
    if content.sealed is None and LAYOUTS[evidence.checkpoint.layout].sealed_by_writer and not how.resealed:
        message = "no record says that its writer finished it"
        findings.append(Finding("completeness", Severity.ERROR, message, expected=SEAL_OF_WRITER))
    if content.change is Change.UNCLEAR:
        findings.append(Finding(UNCLEAR_SAVE, Severity.SICKNESS, _UNCLEAR))
    if view.settings.checks and not view.settings.no_plugins and not how.alone:
        from ckptguard.verification.plugin_checks import plugin_findings  # only for runs that name some

        findings += plugin_findings(evidence, findings, view.settings)
    smaller = history.verdict(content.grew_from) if content.grew_from is not None else None
    same_bytes = _verdicts_of_the_same_bytes(history, evidence, content.id)
    return [*_with_suspicion(findings, history.verdict(content.id), smaller, *same_bytes), *how.notes]


def _recorded(
    view: RunView, evidence: Evidence, read: Read, content: ReadContent, findings: list[Finding], outcome: Outcome
) -> Manifest | None:
    """Seal the checkpoint if it is new, and record the verdict. Returns its manifest, if it has one."""
    history, sealed, id = view.history, content.sealed, content.id
    entries, before = evidence.checkpoint.entries, history.verdict(id)
    damaged = sealed is not None and content.change is not Change.SAME
    unfinished = outcome is Outcome.INCOMPLETE or any(f.expected == SEAL_OF_WRITER for f in findings)
    if sealed is None and not unfinished:
        sealed = seal_observed(view.run, evidence, id)
        history.note_manifest(sealed)
    verdict = msgspec.structs.replace(
        _verdict(evidence, read, id, findings, outcome),
        place_damaged=damaged,
        seen=signature_seen(entries, sealed, damaged=damaged) if sealed is not None else (),
        content=sealed_outcome(before) if damaged and before is not None else None,
    )
    if not _says_nothing_new(history, verdict, before):
        history.add_verdict(verdict)
    if sealed is not None and not damaged and (ctimes := other_ctimes((f.entry for f in read.scan.files), sealed)):
        note_ctimes(view.run, id, ctimes)
    if sealed is not None and not damaged and read.md5 and not all(file.md5 for file in sealed.files):
        md5s = {file.entry.key: file.md5 for file in read.scan.files if file.md5}
        record_late_md5s(view.run, id, {file.path: md5s[file.path] for file in sealed.files if file.path in md5s})
    return sealed


def _verdict(evidence: Evidence, read: Read, id: CheckpointId, findings: list[Finding], outcome: Outcome) -> Verdict:
    """Return what was found in the bytes of a checkpoint that are in place, or that stay there."""
    plugins = {f.structure.plugin for f in evidence.scan.files if f.structure.plugin}
    plugins |= {f.found for f in findings if f.check == PLUGIN and f.found}
    return Verdict(
        format=VERDICT.writes,
        **msgspec.structs.asdict(id),
        outcome=outcome,
        findings=limit_findings(findings),
        checked_at=utc_now(),
        version=__version__,
        digests=("blake3", "md5") if read.md5 else ("blake3",),
        seconds=round(read.scan.seconds, 3),
        facts=facts_of(evidence),
        read_back="bytes",
        plugins=tuple(sorted(plugins)),
    )


def read_what_stays(
    view: RunView, checkpoint: Checkpoint, stays: Collection[str], staged: Place | None, work: Work
) -> Scan:
    """Read what would stay of a checkpoint in place: these files, and those that were `staged` for it. Each has the key
    that it will have. Raises as `verify_checkpoint` does."""
    left = msgspec.structs.replace(checkpoint, entries=tuple(e for e in checkpoint.entries if e.key in stays))
    options = ScanOptions(md5=False, yield_for=work.yield_for)
    scan = scan_checkpoint(view.run.storage, left, options, work)
    files = {file.entry.key: file for file in scan.files}
    if staged is not None:
        keys = [e.key for e in staged.storage.list(staged.key(""), recursive=True)]
        for file in work.scanner(staged.storage, keys, options, work.progress).files:
            entry = msgspec.structs.replace(file.entry, key=file.entry.key.removeprefix(staged.prefix))
            files[entry.key] = msgspec.structs.replace(file, entry=entry)
    now = view.look_again(checkpoint.path)
    if now is None or now.signature != checkpoint.signature:
        raise ChangedWhileReadError(f"{checkpoint.path} changed while it was read", key=checkpoint.path)
    return msgspec.structs.replace(scan, files=tuple(files[e.key] for e in checkpoint.entries if e.key in files))


def judge_thinned(view: RunView, checkpoint: Checkpoint, thinned: Manifest, scan: Scan) -> Verdict | str:
    """Return the verdict of what would stay of a checkpoint in place, which was read; or what is wrong with it. Nothing
    is recorded. What a user has cleared of the whole one stays cleared."""
    left = msgspec.structs.replace(checkpoint, entries=tuple(file.entry for file in scan.files))
    read, content = Read(scan, NO_SUMS, False), ReadContent(thinned.id, thinned)
    for sealed in thinned.files:
        found = scan.file(sealed.path)
        if found is None or not same_content(sealed, found):
            return f"{escape(sealed.path)} differs from what was sealed"
    evidence = _evidence(view, left, read, FULLY, content)
    before = view.current(checkpoint)
    findings = _with_suspicion(
        _findings(view, evidence, FULLY, content), view.history.verdict(before) if before is not None else None
    )
    outcome = judge(findings, sealed=True)
    if outcome is not Outcome.GOOD:
        return f"what stays would be {outcome.value}: {why(findings, most=1)}"
    return _verdict(evidence, read, thinned.id, findings, outcome)


def change_of(view: RunView, checkpoint: Checkpoint, scan: Scan, sealed: Manifest, *, was_gone: bool = False) -> Change:
    """Return how what was read differs from what was sealed. New tensors in the files that a plugin read do not make a
    new save of damaged other files."""
    history, layout = view.history, LAYOUTS[checkpoint.layout]
    verdict = history.verdict(sealed.id)
    past = KnownBefore(
        ever_good=history.was_good(sealed.id),
        facts=verdict.facts if verdict is not None and not verdict.place_damaged else Facts(),
        other_contents=lambda: _other_contents(history, sealed.id),
        was_gone=lambda: was_gone or _was_gone(view, sealed.id),
    )
    broken = any(f.structure.is_broken for f in scan.files) or any(
        g.fatal for g in gaps_of(checkpoint, scan, sealed.thinned)
    )
    change = classify_change(
        sealed,
        {f.entry.key: f for f in scan.files},
        past,
        whole=not broken,
        last_written=layout.last_written(sealed.path),
        sealed_by_writer=layout.sealed_by_writer,
        counters=lambda: counters_of(checkpoint, scan),
    )
    if change in (Change.SAME, Change.DAMAGED):
        return change
    from ckptguard.checks.without_plugins import files_of_ours  # of a save that was written again

    ours, rest, known = files_of_ours(checkpoint, scan, sealed)
    if len(rest.files) == len(scan.files) and len(known.files) == len(sealed.files):
        return change
    alone = change_of(view, ours, rest, known, was_gone=was_gone) if holds_floats(known) else Change.SAME
    return alone if alone in (Change.DAMAGED, Change.UNCLEAR) else change


def _was_gone(view: RunView, id: CheckpointId) -> bool:
    """True if a pass saw its path empty since its verdict, or if the sealed files were moved to the trash: the files in
    their place are newer."""
    current_verdict = view.history.current_verdict(id)
    if current_verdict is not None and was_emptied(view.run, current_verdict):
        return True
    with contextlib.suppress(RecordsError):
        mark = read_trashed(view.run, id)
        return mark is not None and mark.how == MOVED
    return False


def _other_contents(history: History, id: CheckpointId) -> Sequence[Manifest]:
    """Return the manifests of the nearest other steps."""
    known = history.ordered(id.series)
    place = bisect_left(known, id.order, key=lambda other: other.order)
    near = known[max(0, place - _OTHERS) : place + _OTHERS]
    nearest = [other for other in near if other.step != id.step and history.is_sealed(other)][:_OTHERS]
    manifests = (history.manifest(other) for other in nearest)
    return [m for m in manifests if m is not None]


def _with_suspicion(findings: list[Finding], *before: Verdict | None) -> list[Finding]:
    """Keep SUSPECT for a generation when it is verified again: only `clear` lifts it, permanently.

    A question about the schema is asked again each time, until `accept` answers it. So is whether the files are
    understood: checksums, or a later version of ours, may answer that. What made it BAD by the word of a plugin stays a
    suspicion if that plugin took no part now: it was turned off or removed, or failed.
    """
    sickness: list[Finding] = []
    cleared: list[Finding] = []
    for verdict in before:
        if verdict is not None and not sickness and not cleared:
            sickness = [f for f in verdict.findings if f.severity is Severity.SICKNESS and f.check not in _ASKED_AGAIN]
            sickness += _said_by_absent_plugins(verdict, findings) if verdict.plugins else []
            cleared = [f for f in verdict.findings if is_clearance(f)]
    if cleared:
        findings = [
            msgspec.structs.replace(f, severity=Severity.NOTICE) if f.severity is Severity.SICKNESS else f
            for f in findings
        ]
    again = {f.check for f in sickness}
    still = [f for f in findings if f.check not in again or f.severity is Severity.ERROR]
    return [*still, *sickness, *cleared]


def _said_by_absent_plugins(before: Verdict, now: Sequence[Finding]) -> list[Finding]:
    asked = {f.found for f in now if f.check == PLUGIN and f.severity is Severity.NOTICE}
    names = {f"{PLUGIN}:{label.rpartition(' ')[0].partition('/')[2]}" for label in asked if label}
    said = [f for f in before.findings if f.severity is Severity.ERROR and f.check.startswith(f"{PLUGIN}:")]
    return [msgspec.structs.replace(f, severity=Severity.SICKNESS) for f in said if f.check not in names]


def _verdicts_of_the_same_bytes(history: History, evidence: Evidence, id: CheckpointId) -> Iterator[Verdict | None]:
    """Yield verdicts on the same bytes, so that SUSPECT follows a checkpoint moved back from quarantine, or resealed.

    A separate save (other times and inodes) is not suspect, even with equal bytes.
    """
    checkpoint = evidence.checkpoint
    present = {e.key: e.signature for e in checkpoint.entries}
    for earlier in history.generations(checkpoint.series, checkpoint.step):
        manifest = history.manifest(earlier)
        if earlier == id or manifest is None or manifest.path != checkpoint.path:
            continue
        written = {f.path: f.signature for f in manifest.files}
        if written == present and identity(manifest.files) == identity(manifest_files(evidence)):
            yield history.verdict(earlier)


def _says_nothing_new(history: History, verdict: Verdict, before: Verdict | None) -> bool:
    """True if the ledger already says all this: the outcome, the heavy findings, and the file signatures."""
    current_verdict = history.current_verdict(verdict.id)
    if before is None or before.outcome is not verdict.outcome or before.plugins != verdict.plugins:
        return False
    torn = current_verdict is not None and current_verdict.outcome is not before.outcome
    return not torn and _weighty(before) == _weighty(verdict) and verdict.seen in ((), before.seen)


def _weighty(verdict: Verdict) -> set[tuple[object, ...]]:
    heavy = (f for f in verdict.findings if f.severity in (Severity.ERROR, Severity.SICKNESS))
    return {(f.check, f.severity, f.file, f.tensor) for f in heavy}


def _confirm_kept(view: RunView, manifest: Manifest, work: Work) -> None:
    """After damage in place, check the kept copy's bytes: a hard link shares the damage, a copy does not."""
    copy = read_kept(view.run, manifest.id)
    if copy and copy_differs(view.run.records, copy.folder + "/", manifest, scanner=work.scanner):
        put_aside(view.run, copy)


def verify_kept(view: RunView, copy: KeptCopy, *, work: Work = PLAIN) -> Checked | None:
    """Read a kept copy whose save was deleted or overwritten before its verdict, and record one for its generation, as
    if its files were in place.

    None if it has nothing to say: it was overwritten, equals an earlier generation, or may be damage of one. Then it is
    released. Raises CouldNotTellError and its kinds if it cannot be read.
    """
    checkpoint = _as_it_was(view, copy)
    how = FULLY if checkpoint is None else Verification(md5=not spares_md5(view, checkpoint.bytes, work))
    read = _read_copy(view, copy, checkpoint, how, work) if checkpoint is not None else None
    if checkpoint is None or read is None:
        _release(view, copy)
        return None
    for _ in range(_RACES):
        view.refresh(copy.series)
        if view.history.has_verdict(copy.id):
            return None
        before = _sealed_before(view, copy)
        change = change_of(view, checkpoint, read.scan, before) if before is not None else Change.RESAVED
        own = before is not None and before.id == copy.id  # its writer has sealed it
        if (change is Change.SAME) is not own or change not in (Change.SAME, *NEW_GENERATION):
            _release(view, copy)
            return None
        try:
            grew_from = before.id if before is not None and change is Change.GREW else None
            content = ReadContent(copy.id, before if own else None, change, grew_from)
            return judge_and_record(view, checkpoint, read, how, content)
        except BusyError:
            continue
    raise CouldNotTellError(f"other processes kept sealing {copy.path} at the same time")


def _as_it_was(view: RunView, copy: KeptCopy) -> Checkpoint | None:
    """Return the copied checkpoint, as it was listed then."""
    found = find_checkpoints(copy.entries, view.run.patterns, (copy.path,), (copy.series,))
    return next((c for c in found if (c.path, c.series, c.step) == (copy.path, copy.series, copy.step)), None)


def _read_copy(view: RunView, copy: KeptCopy, checkpoint: Checkpoint, how: Verification, work: Work) -> Read | None:
    """Read its bytes, under the names and times of the copied files. None if they are not those."""
    run = view.run
    entries = run.records.list(copy.folder, recursive=True)
    if not is_untouched(run, copy, copy.sizes):
        return None
    sums = find_sums(run.records, checkpoint, key=copy.key)
    options = sums.added_to(ScanOptions(md5=how.md5, yield_for=work.yield_for))
    options = read_by_plugins(run.records, {copy.key(file): file for file in copy.files}, options, view.settings, work)
    scan = work.scanner(run.records, [copy.key(file) for file in copy.files], options, work.progress)
    if run.records.list(copy.folder, recursive=True) != entries:
        raise ChangedWhileReadError(f"the kept copy of {copy.path} changed while it was read", key=copy.folder)
    as_copied = zip(scan.files, copy.entries, strict=True)
    files = tuple(msgspec.structs.replace(found, entry=entry) for found, entry in as_copied)
    return Read(msgspec.structs.replace(scan, files=files), sums, how.md5)


def _sealed_before(view: RunView, copy: KeptCopy) -> Manifest | None:
    """Return the newest generation sealed for this path up to it, unless that was quarantined."""
    history = view.history
    for id in reversed(history.generations(copy.series, copy.step)):
        if id.generation <= copy.generation and history.is_quarantined(id):
            return None
        if id.generation <= copy.generation and history.is_sealed(id):
            manifest = history.manifest(id)
            if manifest is None or manifest.path == copy.path:
                return manifest
    return None


def _release(view: RunView, copy: KeptCopy) -> None:
    with run_lock(view.run):
        if read_kept(view.run, copy.id) == copy:
            release(view.run, copy.id)
