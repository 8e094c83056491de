"""Findings, outcomes and verdicts: values, never exceptions."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from ckptguard.errors import RecordsError
from ckptguard.values.ids import CheckpointId, Step, escape
from ckptguard.values.record_formats import VERDICT
from ckptguard.values.record_text import decode_checked

MAX_FINDINGS_PER_CHECK = 50
MOST_CONSTANT = 1000  # names in `Facts.constant`: with that many, others may be missing
_CLEARED = "cleared: "
SEAL_OF_WRITER = "a manifest of its writer"  # what `completeness` expects of a guard's save and did not find
UNDERSTOOD = "understood"  # the check of whether anybody can read a file
PLUGIN = "plugin"  # the check of whether each plugin that should judge it did; its own findings are of "plugin:NAME"


class Outcome(enum.StrEnum):
    """The result of a verdict; ``outcome == "good"`` works, too. PENDING means that there is none, and is never written
    to the ledger."""

    GOOD = "good"
    SUSPECT = "suspect"
    INCOMPLETE = "incomplete"
    BAD = "bad"
    PENDING = "pending"


class Severity(enum.StrEnum):
    """The weight of one finding, the heaviest first."""

    ERROR = "error"
    SICKNESS = "sickness"
    WARNING = "warning"
    NOTICE = "notice"


# The worst first. For a whole target a pending checkpoint outweighs a good one, never a bad one.
WORST_FIRST = (Outcome.BAD, Outcome.INCOMPLETE, Outcome.PENDING, Outcome.SUSPECT, Outcome.GOOD)


_BY_WEIGHT = tuple(Severity)


class Finding(msgspec.Struct, frozen=True):
    """One fact that a check found. `file` is relative to the target (in records: to the run)."""

    check: str
    severity: Severity
    message: str
    file: str | None = None
    tensor: str | None = None
    count: int | None = None
    expected: str | None = None
    found: str | None = None
    omitted: int | msgspec.UnsetType = msgspec.UNSET

    @property
    def sentence(self) -> str:
        """The message, with what it is about."""
        about = self.tensor or self.file
        return f"{about}: {self.message}" if about else self.message


def heaviest_words(findings: Iterable[Finding]) -> str:
    """Return the message of the heaviest finding, with its subject; "" if nothing weighs."""
    heaviest = next(iter(heaviest_first(findings)), None)
    return "" if heaviest is None or heaviest.severity is Severity.NOTICE else heaviest.sentence


class Facts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Numbers that later checks of the series compare with; all finite."""

    largest_magnitude: float | None = None
    largest_tensor: str | None = None
    constant: tuple[str, ...] = ()
    resumable: tuple[str, ...] = ()  # roles present: model, optimizer, scheduler, scaler, rng, data
    stale: bool = False  # weights and optimizer moments equal those of the step before
    skipped_steps: int | None = None  # updates that DeepSpeed skipped so far
    world_size: int | None = None  # ranks, if the checkpoint itself states them
    thinned: tuple[str, ...] = ()  # roles that were taken away after it was verified: optimizer, scheduler, scaler


class Verdict(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Outcome and findings of one generation of a checkpoint, with their time and version."""

    # 2: it does not name its manifest; 1: a step is one number or none. Release 0.1 did not state it: there it is 3.
    # By a factory, because a default would be omitted.
    format: int = msgspec.field(default_factory=lambda: 3)
    series: str
    step: Step
    generation: int
    outcome: Outcome
    findings: tuple[Finding, ...] = ()
    checked_at: str
    version: str
    digests: tuple[str, ...] = ()  # the digests that this pass computed: ("blake3", "md5")
    seconds: float | None = None
    facts: Facts = Facts()
    place_damaged: bool = False  # the bytes in place differ from the sealed ones; a whole copy may be elsewhere
    # How the storage described the files that were read: path, size, mtime, inode, etag of each. Only if that differs
    # from the manifest (restored, a copied run), or if their bytes differ from the sealed ones.
    seen: tuple[tuple[str, int, int | None, int | None, str | None], ...] = ()
    # "bytes": every byte was read at the checkpoint's own place. "checksum", from an older version, about a replica:
    # for some files the store's own checksum was compared instead.
    read_back: str = ""
    content: Outcome | None = None  # with place_damaged: the outcome of the sealed bytes, when last seen whole
    plugins: tuple[str, ...] = ()  # those that took part: "formats/msgpack 0.1.0"
    manifest: str = ""  # `content_digest` of the manifest that it is about; "" if nothing is sealed

    @property
    def id(self) -> CheckpointId:
        """The id of the checkpoint."""
        return CheckpointId(self.series, self.step, self.generation)


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """Return the worst of some written outcomes: bad > incomplete > suspect > good."""
    return min(outcomes, key=WORST_FIRST.index)


def target_outcome(outcomes: Iterable[Outcome]) -> Outcome:
    """Return the outcome of a run from its checkpoints. A run without checkpoints is pending."""
    return min(outcomes, key=WORST_FIRST.index, default=Outcome.PENDING)


def judge(findings: Iterable[Finding], *, sealed: bool) -> Outcome:
    """Turn findings into an outcome. An error is BAD, a sickness is SUSPECT; warnings and notices leave GOOD.

    An unsealed checkpoint whose only errors are about completeness is INCOMPLETE.
    """
    errors = [f for f in findings if f.severity is Severity.ERROR]
    if errors:
        only_incomplete = not sealed and all(f.check == "completeness" for f in errors)
        return Outcome.INCOMPLETE if only_incomplete else Outcome.BAD
    return Outcome.SUSPECT if any(f.severity is Severity.SICKNESS for f in findings) else Outcome.GOOD


def why(findings: Sequence[Finding], *, most: int = 3) -> str:
    """Say why an outcome is as it is: the first findings that made it, with their files and tensors. "" without any."""
    heavy = [f for f in findings if f.severity in (Severity.ERROR, Severity.SICKNESS)] or findings
    said = "; ".join(": ".join(map(escape, filter(None, (f.file, f.tensor, f.message)))) for f in heavy[:most])
    return said if len(heavy) <= most else f"{said}; and {len(heavy) - most} more"


def clearance(reason: str) -> Finding:
    """Return the finding with which a user lifts SUSPECT from a generation."""
    return Finding("incident", Severity.NOTICE, _CLEARED + reason)


def is_clearance(finding: Finding) -> bool:
    """True if a finding says that a user lifted SUSPECT."""
    return finding.check == "incident" and finding.severity is Severity.NOTICE and finding.message.startswith(_CLEARED)


def heaviest_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings by their weight, those of one weight in their order."""
    return tuple(sorted(findings, key=lambda finding: _BY_WEIGHT.index(finding.severity)))


def limit_findings(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return the heaviest findings, heaviest first: of each check at most
    `MAX_FINDINGS_PER_CHECK`, then one with the number left out. A file
    with many findings leaves room for those about other files."""
    limit, kept = MAX_FINDINGS_PER_CHECK, list[Finding]()
    for check in dict.fromkeys(f.check for f in findings):
        own = tuple(f for f in findings if f.check == check)
        if len(own) > limit:
            own = heaviest_first(own)
            before = Counter[tuple[Severity, str | None]]()
            place: dict[int, int] = {}  # the how manieth of its weight about its file each one is
            for number, finding in enumerate(own):
                place[number] = before[finding.severity, finding.file]
                before[finding.severity, finding.file] += 1
            order = sorted(place, key=lambda number: (_BY_WEIGHT.index(own[number].severity), place[number]))
            left, heaviest_left = len(own) - limit, own[min(order[limit:])].severity
            own = tuple(own[number] for number in sorted(order[:limit]))
            own += (Finding(check, heaviest_left, f"{left} more findings", omitted=left),)
        kept += own
    return heaviest_first(kept) if len(kept) > 1 else tuple(kept)


def decode_verdict(text: bytes) -> Verdict:
    """Parse a ledger entry. Raises RecordsError if it is damaged or has a newer format."""
    verdict = decode_checked(text, Verdict, "a ledger entry")
    if verdict.format > VERDICT.reads:
        raise RecordsError(f"a ledger entry has format {verdict.format}", hint="upgrade ckptguard")
    return verdict
