"""``ckptguard status``: am I protected?"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import click

from ckptguard.cli.command import PathOrUrl, Shared, command
from ckptguard.cli.failures import error_fields
from ckptguard.cli.render import age, facts, say_text, size, some, table, warn_not_understood
from ckptguard.errors import CkptguardError, NotFoundError
from ckptguard.terminal.output import emit, is_quiet, report_error, warn
from ckptguard.values.exit_codes import ExitCode, of_error

if TYPE_CHECKING:
    from ckptguard.inspect.status import Status
    from ckptguard.records.room import RoomProblem
    from ckptguard.runs.find_known_good import KnownGood
    from ckptguard.runs.run_view import RunView
    from ckptguard.values.settings import Settings

_PLACES = {"kept": " (a kept copy)", "replica": " (in a replica)"}
_COPIES = {"copy": "full copies", "link": "hard links", "reflink": "reflinks"}
_LOOK_AT = "look at the pattern, and quote it"
CODES = (ExitCode.NOT_FOUND, ExitCode.NO_KNOWN_GOOD)


@command("status", "Say whether a run is protected.", CODES, common="quiet json config records")
@click.argument("runs", type=PathOrUrl(), nargs=-1, required=True, metavar="RUN...")
def status(runs: tuple[str, ...], shared: Shared) -> None:
    """Say whether RUN is protected, and why: its known-good checkpoint, the saves that wait for a verdict, the last
    incident, the daemon, and the copies.

    Several runs have one line each. A pattern such as 'runs/*' stands for all runs with such a name.
    """
    settings = shared.settings(runs)
    if len(runs) > 1 or _is_pattern(runs[0]):
        every = list(_each(runs, settings))
        if shared.as_json:
            emit("status", runs=[_as_document(one) for _, one in every])
        else:
            _show_all(every)
        raise click.exceptions.Exit(_code([one for _, one in every]))
    view = _view(runs[0], settings)
    found = _status(view)
    warn(*view.listing.unread_notes)
    if found.not_understood is not None:
        warn_not_understood(found.not_understood)
    if shared.as_json:
        emit("status", found)
    elif not (is_quiet() and _is_well(found)):
        _show(found)
    raise click.exceptions.Exit(_code([found]))


class Unseen(NamedTuple):
    """A run of several that could not be looked at."""

    run: str
    error: CkptguardError


def _view(run: str, settings: Settings) -> RunView:
    from ckptguard.runs.run_view import open_view

    return open_view(run, settings)


def _status(view: RunView) -> Status:
    from ckptguard.inspect.status import status
    from ckptguard.supervise.lock_file import is_supervised

    return status(view, supervised=is_supervised(view.run.url, os.environ))


def _each(runs: Sequence[str], settings: Settings) -> Iterator[tuple[str, Status | Unseen]]:
    """The name and the status of every run; one that cannot be looked at ends none of the others."""
    for said in runs:
        try:
            places = _folders(said, settings) if _is_pattern(said) else [said]
        except CkptguardError as error:
            yield said, Unseen(said, error)
            continue
        found = 0
        for place in places:
            try:
                view = _view(place, settings)
                if _is_pattern(said) and not _is_run(view):
                    continue
                one: Status | Unseen = _status(view)
            except CkptguardError as error:
                one = Unseen(place, error)
            found += 1
            yield place, one
        if not found:
            yield said, Unseen(said, NotFoundError(f"no folder {said} holds a run", hint=_LOOK_AT))


def _is_pattern(run: str) -> bool:
    return any(c in run for c in "*?[") and not os.path.lexists(run)


def _is_run(view: RunView) -> bool:
    from ckptguard.records.run import has_records

    return bool(view.checkpoints) or has_records(view.run)


def _folders(pattern: str, settings: Settings) -> list[str]:
    if "://" not in pattern:
        import glob

        return sorted(place for place in glob.glob(os.path.expanduser(pattern)) if os.path.isdir(place))
    import fnmatch

    from ckptguard.errors import SettingsError
    from ckptguard.storage import open_storage
    from ckptguard.values.ids import RECORDS_FOLDER

    parent, _, name = pattern.rstrip("/").rpartition("/")
    if any(c in parent for c in "*?["):
        raise SettingsError(f"{pattern} has a pattern in the middle", hint="on a store, only the last part may be one")
    entries = open_storage(parent, options=settings.storage).list("")
    found = (e.name for e in entries if e.kind == "folder" and e.name != RECORDS_FOLDER)
    return [f"{parent}/{one}" for one in sorted(found) if fnmatch.fnmatchcase(one, name)]


def _code(every: Sequence[Status | Unseen]) -> ExitCode:
    """A run that surely has no known-good checkpoint weighs more than one that could not be looked at."""
    alive = [one for one in every if isinstance(one, Unseen) or one.summary.state != "ended"]
    if any(not isinstance(one, Unseen) and one.known_good is None for one in alive):
        return ExitCode.NO_KNOWN_GOOD
    return next((of_error(one.error) for one in every if isinstance(one, Unseen)), ExitCode.GOOD)


def _as_document(one: Status | Unseen) -> object:
    from ckptguard.documents.build import fields

    return {"target": one.run, "error": error_fields(one.error)} if isinstance(one, Unseen) else fields(one)


def _is_well(one: Status | Unseen) -> bool:
    """Whether -q has nothing to say of it."""
    if isinstance(one, Unseen) or one.newest_bad or not one.explanation.startswith("yes"):
        return False
    return one.not_understood is None and not any(replica.trouble for replica in one.replicas)


def _show_all(every: Sequence[tuple[str, Status | Unseen]]) -> None:
    from ckptguard.documents.done_lines import silenced_mark

    rows: list[tuple[object, ...]] = []
    for name, one in every:
        if is_quiet() and _is_well(one):
            continue
        if isinstance(one, Unseen):
            report_error(one.error)
            rows.append((name, "unknown", None, None, None, None))
            continue
        good, waiting = one.known_good, len(one.pending) + len(one.changed)
        row = (
            good and good.path.removeprefix(f"{one.run}/"),
            good and age(one.known_good_age_seconds),
            waiting or None,
        )
        incident = one.last_incident
        last = incident and f"{incident.cause} ({incident.state})"
        rows.append((name, one.explanation.partition(":")[0] + silenced_mark(one.summary.silence), *row, last))
        if one.not_understood is not None:
            warn(f"{name}: {one.not_understood.sentence}")
        warn(*(f"{replica.url}: {replica.trouble}" for replica in one.replicas if replica.trouble))
    if rows:
        table(("run", "protected", "known-good", "verified ago", "waiting", "last incident"), rows)


def _show(found: Status) -> None:
    from ckptguard.decisions.at_risk import at_risk_words
    from ckptguard.decisions.growth import filling_words
    from ckptguard.documents.done_lines import current_verdict_text, silence_text

    known_good, daemon = found.known_good, found.daemon
    if found.newest_bad:
        say_text(_bad_words(found))
    say_text(f"protected? {found.explanation}")
    facts(
        ("known-good", known_good and f"{known_good.path}{known_good.id.nth_save}{_place_words(known_good)}"),
        ("verified", known_good and f"{age(found.known_good_age_seconds)} ago"),
        ("at risk", at_risk_words(found.at_risk)),
        ("verdicts", ", ".join(f"{n} {outcome}" for outcome, n in found.outcomes.items() if n)),
        ("pending", some(found.pending)),
        ("thinned", found.thinned and f"{some(found.thinned)}: a resume would restart their optimizer"),
        ("changed", f"{some(found.changed)}: not read again yet (ckptguard verify)" if found.changed else None),
        ("last incident", _incident_words(found)),
        ("daemon", daemon and f"pid {daemon.pid} on {daemon.host} since {daemon.started_at}"),
        ("kept copies", _copies(found)),
        ("without MD5", _without_md5(found.summary.without_md5)),
        ("room", found.room and _room_words(found.room)),
        ("space", filling_words(found.summary)),
        ("silenced", found.summary.silence and silence_text(found.summary.silence)),
        *(("replica", f"{r.url}: {r.trouble or current_verdict_text(r)}") for r in found.replicas),
    )


def _bad_words(found: Status) -> str:
    """That the newest saves are not good, why the first of them is not, and what to do."""
    bad = found.newest_bad
    outcome, *others = {one.outcome.value for one in bad}
    saves = len({one.path if one.step is None else one.step for one in bad})
    lead = "the newest save is" if saves == 1 else f"the newest {saves} saves are"
    paths, why = some([one.path for one in bad], most=3), f" ({bad[0].reason})" if bad[0].reason else ""
    run = shlex.quote(found.run)
    now = f"to go back: ckptguard rollback {run}" if found.known_good else "nothing is known to be good"
    return f"{lead} {'not good' if others else outcome}: {paths}{why}; {now}"


def _place_words(known_good: KnownGood) -> str:
    """Where the known-good checkpoint is, and what a resume from it would lose."""
    lost = f" (thinned: a resume would restart: {', '.join(known_good.thinned)})" if known_good.thinned else ""
    return _PLACES.get(known_good.place, "") + lost


def _copies(found: Status) -> str | None:
    """How the copies that are kept came to be, and what they take."""
    how = " and ".join(_COPIES.get(kind, kind) for kind in found.kept_kinds)
    return f"{how}, {size(found.kept_bytes)}" if found.kept_bytes else how or None


def _without_md5(count: int) -> str | None:
    return f"{count} good save{'s' * (count > 1)}: a daemon takes it in idle time" if count else None


def _room_words(room: RoomProblem) -> str:
    released = f"; released: the copies of {some(room.released)}" if room.released else ""
    what = f"the next saves need {size(room.needed)}, and {size(room.free)} were free"
    return f"{room.problem}: {what}{released}"


def _incident_words(found: Status) -> str | None:
    incident = found.last_incident
    if incident is None:
        return None
    where = f"step {incident.step}: " if incident.step is not None else ""
    return f"{where}{incident.reason} ({incident.state})"
