"""What verification found, as lines for people: the command line prints them, and so does a report in Python.

Every name that came from a file is escaped here, once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ckptguard.values.ids import escape, named_path
from ckptguard.values.plain_numbers import size

if TYPE_CHECKING:
    from ckptguard.runs.results import Checked, VerifyReport
    from ckptguard.values.verdict import Finding

ORDER = ("bad", "incomplete", "suspect", "pending", "good")
_NUMBERS = re.compile(r"[\d.]*\d")


class Line(NamedTuple):
    """One line of text; `word` in it is an outcome or a severity, which a terminal may show in colour."""

    lead: str = ""
    word: str = ""
    rest: str = ""

    @property
    def text(self) -> str:
        """The whole line."""
        return self.lead + self.word + self.rest


class Table(NamedTuple):
    """Rows under titles. Their cells are not escaped yet."""

    titles: Sequence[str]
    rows: Sequence[Sequence[object]]

    @property
    def text_rows(self) -> list[list[str]]:
        """The titles and the rows as text that is safe to print; "-" where a value is not known."""
        cells = [["-" if c is None or c == "" else escape(str(c)) for c in row] for row in self.rows]
        return [[title.upper() for title in self.titles], *cells] if self.titles else cells


def report_lines(report: VerifyReport, *, incident_of: str | None = None, only_wrong: bool = False) -> Iterator[Line]:
    """One line for each checkpoint, its findings below it, and a last line that sums up. `incident_of` is the run that
    has an incident about it; `only_wrong` leaves out what is good."""
    for checked in report.checkpoints:
        if only_wrong and checked.outcome.value == "good":
            continue
        checked = msgspec.structs.replace(checked, path=named_path(checked.path, report.target))
        yield from checked_lines(checked, notices=report.kind != "run" or checked.outcome.value == "pending")
    yield from (Line(sentence) for sentence in _what_to_do(report, incident_of))
    if only_wrong and report.outcome.value == "good":
        return
    counts = Counter(c.outcome.value for c in report.checkpoints)
    parts = ", ".join(f"{counts[o]} {o}" for o in ORDER if counts[o]) or "no checkpoints"
    yield Line(f"{escape(report.target)}: ", report.outcome.value, f" ({parts})")


def checked_lines(checked: Checked, *, notices: bool = True) -> Iterator[Line]:
    """One line for a checkpoint that was checked, and one for each finding; notices may only be counted."""
    shown = checked.id.nth_save if checked.id else ""
    quiet = [f for f in checked.findings if f.severity.value == "notice" and not notices]
    counted = f", {len(quiet)} notice{'s' * (len(quiet) > 1)}" if quiet else ""
    word = checked.outcome.value
    path = escape(checked.path) or "-"
    yield Line("", word, f"{'':{10 - len(word)}} {path}{shown}  {size(checked.bytes)}{counted}")
    yield from finding_lines((f for f in checked.findings if f not in quiet), checked.path)


def finding_lines(findings: Iterable[Finding], checkpoint: str) -> Iterator[Line]:
    """Yield one line for all findings that differ only in their place and their numbers, the heaviest first. It says
    the severity, the check, the places in the checkpoint of this path, and the message."""
    from ckptguard.values.verdict import heaviest_first  # records of older versions have them by check

    alike: dict[tuple[str, ...], list[Finding]] = {}
    for finding in heaviest_first(findings):
        about = "tensor" if finding.tensor else "file" if finding.file else finding.message
        key = (finding.severity.value, finding.check, about, _NUMBERS.sub("#", finding.message))
        alike.setdefault(key, []).append(finding)
    for (severity, check, *_), group in alike.items():
        yield Line("  ", severity, f" [{escape(check)}] {_words(group, checkpoint)}")


def _words(group: Sequence[Finding], checkpoint: str) -> str:
    """What is said of findings that are alike: by the first of them, tensors before files."""
    message = group[0].message
    tensors, files = (
        list(dict.fromkeys(filter(None, names))) for names in zip(*((f.tensor, f.file) for f in group), strict=True)
    )
    files = [file.removeprefix(f"{checkpoint}/") for file in files]
    about = tensors or files
    lead = f"{_first_of(about)}: " if about and not (len(group) == 1 and about[0] in message) else ""
    more = f" (and {len(group) - 1} more like it)" if len(about) < 2 < 1 + len(group) else ""
    named = bool(tensors and files) and not (len(files) == 1 and files[0] in (message, checkpoint))
    where = f" ({_first_of(files, 'file')})" if named else ""
    return f"{lead}{escape(message)}{more}{where}"


def _first_of(names: Sequence[str], noun: str = "") -> str:
    rest = len(names) - 1
    noun = f" {noun}{'s' * (rest > 1)}" if noun else ""
    return escape(names[0]) + (f" and {rest} more{noun}" if rest else "")


def _what_to_do(report: VerifyReport, incident_of: str | None) -> list[str]:
    """What a user can say to what was found, once for all of it. Of a file that is broken nothing can be said."""
    said: dict[str, str] = {}
    for checked in report.checkpoints:
        errors = {f.check for f in checked.findings if f.severity.value == "error"}
        for finding in checked.findings:
            for about, words in _ANSWERS[finding.severity.value](report, checked, finding, errors).items():
                said.setdefault(about, words)
    if incident_of is not None:
        said["incident"] = f"what is known about it: {_command('incident', incident_of)}"
    return list(said.values())


def _to_notice(report: VerifyReport, checked: Checked, finding: Finding, errors: set[str]) -> dict[str, str]:
    sums = f"get the publisher's checksums, then: {_command('verify', report.target)} --sums FILE"
    if finding.check == "digests" and finding.file and finding.count and checked.id is None:
        return {"sums": f"to be sure of every bit: {sums}"}  # no checksum vouches for a file
    if finding.check == "checksum-file":
        return {"sums": f"fix or remove the checksum file, or {sums}"}
    return {}


def _to_error(report: VerifyReport, checked: Checked, finding: Finding, errors: set[str]) -> dict[str, str]:
    import shlex  # only where something was found

    check = finding.check
    if check == "digests" and finding.expected and report.kind != "run":
        return {check: "download what differs again; if it stays so, ask the publisher for the checksums"}
    if errors == {check} == {"finite"} and finding.tensor and finding.count:
        option = escape(f"--allow-nonfinite {shlex.quote(finding.tensor)}")
        return {check: f"if a tensor must be so: {option} (or a pattern for several)"}
    if check == "pickle-safety" and finding.found and finding.count:  # names that are on no list, but run nothing
        patterns = _patterns(finding.found)
        options = " ".join(f"--trust-global {shlex.quote(one)}" for one in patterns[:_MOST_PATTERNS])
        more = len(patterns) - _MOST_PATTERNS
        rest = f" and {more} more, which --json names" if more > 0 else ""
        return {check: f"if you know what it is: {escape(options)}{rest}"}
    return {}


def _to_doubt(report: VerifyReport, checked: Checked, finding: Finding, errors: set[str]) -> dict[str, str]:
    check, clear = finding.check, f"{_command('clear', report.target, checked.path)} --reason TEXT"
    if errors:
        return {}
    if check == "digests":
        return {check: "download it again; if you changed it yourself: remove its .cache/huggingface"}
    if check == "schema":
        return {check: f"if other tensors are deliberate: {_command('accept', report.target, checked.path)}"}
    if check == "understood":
        later = "for the next ones: a list of checksums beside them, or ckptguard.seal in your code"
        return {check: f"if you know that it is whole: {clear}", "seal": later}
    return {"suspicion": f"if all is well: {clear}"}


_MOST_PATTERNS = 20  # a hostile file may name half a million classes
# What can be said to one finding, by its severity. `errors` are the checks that found errors in the same checkpoint.
_ANSWERS: dict[str, Callable[[VerifyReport, Checked, Finding, set[str]], dict[str, str]]] = {
    "error": _to_error,
    "sickness": _to_doubt,
    "warning": lambda *_: {},
    "notice": _to_notice,
}


def _patterns(found: str) -> list[str]:
    """Return the names, those of one package as a pattern."""
    from ckptguard.checks.pickle_safety import NAMES_BETWEEN

    packages: dict[str, list[str]] = {}
    for name in found.split(NAMES_BETWEEN):
        packages.setdefault(".".join(name.split(".")[:2]), []).append(name)
    return [names[0] if len(names) == 1 else f"{package}.*" for package, names in packages.items()]


def _command(verb: str, *places: str) -> str:
    import shlex

    return escape(f"ckptguard {verb} {' '.join(map(shlex.quote, places))}")
