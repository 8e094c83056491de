"""What verification found, as lines for people, and what to do now. The command line and reports in Python print them.

Every name that came from a file is escaped here, once.
"""

from __future__ import annotations

import re
import shlex
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
_MOST_NAMED = 50  # files in one sentence: as many as there are findings of one check
_MOST_PATTERNS = 20  # a hostile file may name half a million classes
_NAMES = "\0"  # stands for the files that a sentence is about; no name has it, for names are escaped
_WILD = re.compile(r"[*?[]")


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
    yield from map(Line, what_now(report))
    if incident_of is not None:
        yield Line(f"what is known about it: {command('incident', incident_of)}")
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


class About(NamedTuple):
    """One finding, where it was found, and the checks that found errors in the same checkpoint."""

    report: VerifyReport
    checked: Checked
    finding: Finding
    errors: frozenset[str]

    @property
    def weight(self) -> str:
        """The severity, as a word."""
        return self.finding.severity.value

    @property
    def name(self) -> str:
        """The file, else the checkpoint, as the lines of the report name it. Of several checkpoints the path says
        which one's file it is."""
        path, alone = self.checked.path, len(self.report.checkpoints) == 1
        file = self.finding.file or path
        return named_path(file.removeprefix(f"{path}/") if alone else file, self.report.target)

    @property
    def place(self) -> tuple[str, str]:
        """The run, and the path of the checkpoint in it, as commands take them."""
        run, inside = self.report.run or self.report.target, self.checked.path
        if self.report.kind != "run" and self.report.target.startswith(f"{run.rstrip('/')}/"):
            inside = self.report.target.removeprefix(f"{run.rstrip('/')}/")
        return run, inside

    @property
    def url(self) -> str:
        """The checkpoint."""
        target, path = self.report.target, self.checked.path
        return f"{target.rstrip('/')}/{path}" if self.report.kind == "run" and path != "." else target

    @property
    def is_hostile(self) -> bool:
        """True if something in the same file would run code: nothing else is to be done with it."""
        return any(
            one.check == "pickle-safety" and one.severity.value == "error" and one.file == self.finding.file
            for one in self.checked.findings
            if one.found and not one.count
        )


Answer = Callable[[About], Iterator[str]]


def what_now(report: VerifyReport) -> list[str]:
    """Return what to do now, each sentence once, with the files that it is about: what is urgent first, then what a
    user may say to it. Of what weighs, each finding has an answer."""
    named: dict[str, dict[str, None]] = {}
    for checked in report.checkpoints:
        errors = frozenset(f.check for f in checked.findings if f.severity.value == "error")
        for finding in checked.findings:
            about = About(report, checked, finding, errors)
            for sentence in answers_to(about):
                named.setdefault(sentence, {})[about.name] = None
    said = [sentence.replace(_NAMES, _listed([*names])) for sentence, names in named.items()]
    return sorted(said, key=lambda sentence: sentence.startswith(("if ", "to be sure", "for the next")))


def answers_to(about: About) -> Iterator[str]:
    """Yield what can be done about one finding."""
    if about.finding.omitted:
        return  # only the number of those that were left out: the others have the answer
    if about.is_hostile:
        yield f"delete {_NAMES}: loading runs code"
    if not about.is_hostile or about.finding.check == "pickle-safety":
        own = [*ANSWERS.get(about.finding.check, _of_sickness)(about)]
        yield from own or (_look(about) if about.weight != "notice" and not about.is_hostile else ())


def _listed(names: Sequence[str]) -> str:
    shown = [escape(name) for name in names[:_MOST_NAMED]]
    shown += [f"{len(names) - _MOST_NAMED} more"] if len(names) > _MOST_NAMED else []
    return " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))


def _of_damage(about: About) -> Iterator[str]:
    """The bytes are not those that were written."""
    if about.weight in ("error", "sickness"):
        yield f"download {_NAMES} again" if about.report.run is None else _back(about, damaged=True)
    if about.weight == "sickness":
        yield from _clear(about)


def _of_completeness(about: About) -> Iterator[str]:
    """Files are missing, or the record that all are there."""
    from ckptguard.values.verdict import SEAL_OF_WRITER

    if about.finding.expected != SEAL_OF_WRITER or about.report.known_good is not None:
        yield from _of_damage(about)
    if about.finding.expected == SEAL_OF_WRITER:
        newest = [c for c in about.report.checkpoints if any(f.expected == SEAL_OF_WRITER for f in c.findings)][-1]
        place = About(about.report, newest, about.finding, about.errors).url
        yield f"if {escape(newest.path)} is whole, and only its records are lost: {command('reseal', place)}"


def _of_sickness(about: About) -> Iterator[str]:
    """The values are not those of a healthy training."""
    if about.weight in ("error", "sickness"):
        elsewhere = f"use another version of {_NAMES}, or download it again: it holds no healthy weights"
        yield elsewhere if about.report.run is None else _back(about, damaged=False)
    finding = about.finding
    if about.weight == "error" and about.errors == {"finite"} and finding.tensor and finding.count:
        option = escape(f"--allow-nonfinite {shlex.quote(_literal(finding.tensor))}")
        if not any(f.tensor and f.count for f in _before(about)):
            yield f"if a tensor must be so: {option} (or a pattern for several)"
    if about.weight == "sickness":
        yield from _clear(about)


def _before(about: About) -> Iterator[Finding]:
    """The findings of the same check that came first: one of them has said it."""
    for checked in about.report.checkpoints:
        for finding in checked.findings:
            if finding is about.finding:
                return
            if finding.check == about.finding.check and finding.severity is about.finding.severity:
                yield finding


def _of_digests(about: About) -> Iterator[str]:
    finding, in_run = about.finding, about.report.run is not None
    if about.weight == "notice":
        if finding.file and finding.count and about.checked.id is None:
            yield f"to be sure of every bit: {_sums(about)}"  # no checksum vouches for a file
    elif about.weight == "warning":
        yield f"compare {_NAMES} with a list that names it: {_sums(about)}"
    elif in_run:
        yield from _of_damage(about)
    elif about.weight == "error":
        yield f"download {_NAMES} again; if it still differs, ask the publisher for the checksums"
    elif not about.errors:
        yield f"download {_NAMES} again; if you changed it yourself: remove its .cache/huggingface"


def _of_pickles(about: About) -> Iterator[str]:
    finding = about.finding
    if about.is_hostile:
        if about.report.run is not None:
            yield _back(about, damaged=False)
        return  # whatever else it names, it is not to be trusted
    if finding.count and finding.found and about.weight in ("error", "warning"):
        patterns = _patterns(finding.found)
        options = " ".join(f"--trust-global {shlex.quote(one)}" for one in patterns[:_MOST_PATTERNS])
        more = len(patterns) - _MOST_PATTERNS
        rest = f" and {more} more, which --json names" if more > 0 else ""
        yield f"if you know what it is: {escape(options)}{rest}"


def _of_schema(about: About) -> Iterator[str]:
    if about.weight == "error":
        if about.report.run is None:
            yield f"use another file than {_NAMES}, or another --reference: they are not the same model"
        else:
            yield _back(about, damaged=True)
    elif not about.errors:
        yield f"if other tensors are deliberate: {command('accept', *about.place)}"


def _of_formats(about: About) -> Iterator[str]:
    if about.weight == "notice" and about.checked.outcome.value != "pending":
        return  # something else vouches for it
    if about.weight == "notice" or about.report.run is None:
        from ckptguard.formats.table import suffixes_of

        known = ", ".join(sorted(suffixes_of("tensors", "arrays")))
        yield f"{_NAMES}: a format that is not read ({known} would be); {_sums(about)}"
    elif not about.errors:
        clear = f"{command('clear', *about.place)} --reason TEXT"
        yield f"if you know that it is whole: {clear}"
        yield "for the next ones: a list of checksums beside them, or ckptguard.seal in your code"


def _of_order(about: About) -> Iterator[str]:
    yield f"save {_NAMES} under a name that rises, or name its step by [[patterns]] in ckptguard.toml"


def _of_resume(about: About) -> Iterator[str]:
    if about.weight != "notice":
        yield f"save what {_NAMES} lacks, too, if a resume needs it"


def _of_suspicion(about: About) -> Iterator[str]:
    if about.weight != "notice":
        yield from _clear(about)


def _of_resave(about: About) -> Iterator[str]:
    yield f"if you saved it again: {command('reseal', about.url)}"
    yield from _clear(about)


def _of_checksum_file(about: About) -> Iterator[str]:
    yield f"fix or remove the checksum file, or {_sums(about)}"


def _of_reading(about: About) -> Iterator[str]:
    yield f"verify {_NAMES} again once it can be read and nobody writes it"


def _back(about: About, *, damaged: bool) -> str:
    """What helps a run: the known-good checkpoint, or what is left without one."""
    report, run = about.report, about.report.run or about.report.target
    repair = f"`{command('repair', run)}` takes the right bytes from a copy, if there is one"
    if report.known_good is None and not report.none_is_good:
        return f"none is known to be good yet: see what {command('verify', run)} says of all"
    if report.known_good is None:
        left = f"`{command('known-good', run)}` says if one is in the trash, before training from scratch"
        return f"nothing is good to go back to: {f'{repair}; else {left}' if damaged else left}"
    path, good = report.known_good
    id = about.checked.id
    if id is not None and id.series == good.series and id.order < good.order:
        return f"resume from {escape(path)}, which is newer and good" + (f"; {repair}" if damaged else "")
    if about.checked.step is None and about.checked.series != good.series:  # downloads in one folder look the same
        return (
            f"if one training saved {_NAMES} and {escape(path)}, go back to that: {command('rollback', run)}; "
            "else download it again"
        )
    return f"go back to {escape(path)}: {command('rollback', run)}" + (f"; or {repair}" if damaged else "")


def _of_plugin(about: About) -> Iterator[str]:
    if about.weight != "notice":
        yield "repair or remove the plugin that failed, or leave it out: --no-plugins"
    yield from _of_suspicion(about)


def _clear(about: About) -> Iterator[str]:
    if not about.errors and about.report.run is not None:
        yield f"if all is well: {command('clear', *about.place)} --reason TEXT"


def _look(about: About) -> Iterator[str]:
    """What can be done about anything that weighs."""
    if about.weight == "notice":
        return
    yield f"look at {_NAMES} before you rely on it: {command('show', about.url)}"


def _sums(about: About) -> str:
    return f"get the publisher's checksums, then: {command('verify', about.url)} --sums FILE"


def _patterns(found: str) -> list[str]:
    """Return the names, those of one package as a pattern."""
    from ckptguard.checks.pickle_safety import NAMES_BETWEEN

    packages: dict[str, list[str]] = {}
    for name in found.split(NAMES_BETWEEN):
        packages.setdefault(".".join(name.split(".")[:2]), []).append(name)
    return [_literal(names[0]) if len(names) == 1 else f"{_literal(package)}.*" for package, names in packages.items()]


def _literal(name: str) -> str:
    """Return the pattern that only this name matches: a file chose it."""
    return _WILD.sub(r"[\g<0>]", name)


def command(verb: str, *places: str) -> str:
    """A command of ours that can be pasted."""
    return escape(f"ckptguard {verb} {' '.join(map(shlex.quote, places))}")


# By the check that found something.
ANSWERS: dict[str, Answer] = {
    "structure": _of_damage,
    "completeness": _of_completeness,
    "same-save": _of_damage,
    "zeros": _of_damage,
    "kept": _of_damage,
    "replica": _of_damage,
    "repair": _of_damage,
    "digests": _of_digests,
    "finite": _of_sickness,
    "stale": _of_sickness,
    "drift": _of_sickness,
    "pickle-safety": _of_pickles,
    "schema": _of_schema,
    "understood": _of_formats,
    "order": _of_order,
    "resumable": _of_resume,
    "headroom": _look,
    "incident": _of_suspicion,
    "resave": _of_resave,
    "plugin": _of_plugin,  # the checks of plugins have their own names: rules on values
    "checksum-file": _of_checksum_file,
    "reading": _of_reading,
}
