"""What Prometheus gets to know about the runs and the daemon. `docs/guides/metrics.md` explains each metric.

The text format is written here: it has three rules, and a client library takes four times as long for a thousand runs.
"""

from __future__ import annotations

import copy
import functools
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from ckptguard.decisions.at_risk import at_risk, is_stale
from ckptguard.decisions.fleet_health import late_in
from ckptguard.fleet import PlaceState
from ckptguard.fleet.search import CAUSES
from ckptguard.values.ids import escape, run_id_of
from ckptguard.values.run_summary import RunSummary
from ckptguard.version import __version__
from ckptguard_daemon.log import FIELDS, also_to

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MOST_RUNS = 1000  # as labels; of more only those that need somebody
_STAYS = 7200.0  # seconds for which such a run keeps its series; an alert looks back for an hour
_WAITS_LONG = 1800.0  # seconds
_MOST_CAUSES = 20
_CAUSE = re.compile(r"[a-z_]{1,30}")
_HOOKS = ("on_incident", "webhook", "notify")
# What counts as a message that did not arrive, and from which level on.
_FAILED_AT = {
    "hook_failed": logging.ERROR,  # below that it is tried again
    "hook_event_dropped": logging.ERROR,
    "hook_missing": logging.ERROR,
    "hook_ran": logging.WARNING,  # the command ended with an error
}
_WHY = ("verify", "scrub", "replicate")
_INF = float("inf")
_SIZES = (
    (1e8, "up to 100 MB"),
    (1e9, "up to 1 GB"),
    (1e10, "up to 10 GB"),
    (1e11, "up to 100 GB"),
    (_INF, "larger"),
)


class _Histogram(NamedTuple):
    """A metric of times. Its only label has few values, whatever the runs do."""

    help: str
    label: str
    values: tuple[str, ...]
    limits: tuple[float, ...]


HISTOGRAMS = {
    "verify_seconds": _Histogram(
        "How long verdicts took, by the checkpoint's size.",
        "size",
        tuple(size for _, size in _SIZES),
        (0.1, 1.0, 10.0, 60.0, 600.0, 3600.0, _INF),
    ),
    "save_to_verdict_seconds": _Histogram(
        "From the last write of a save to its first verdict.",
        "",
        ("",),
        (2.5, 5.0, 7.5, 10.0, 15.0, 30.0, 60.0, 120.0, 300.0, 900.0, 3600.0, 21600.0, _INF),
    ),
    "sick_to_decision_seconds": _Histogram(
        "From the first sick save, or else the begin of an incident, to the rollback or other decision.",
        "decision",
        ("rollback", "other"),
        (5.0, 15.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0, _INF),
    ),
}

_HOUR = 3600.0  # seconds
_FRESH = 1.0  # seconds for which the same text serves several who ask

Value = float | None
Labelled = tuple[str, Value]  # the text between the braces
_Named = tuple[str, RunSummary]  # a run and its label


class Times(msgspec.Struct):
    """Times that were measured: how many, by the limit that they stayed below, and their sum."""

    below: dict[float, int] = {}
    sum: float = 0.0


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """What happened since the daemon started."""

    verdicts: dict[str, dict[str, int]] = {}  # by run and outcome
    unverified: dict[str, list[float]] = {}  # when saves went without a verdict, in seconds since 1970, by run
    times: dict[str, dict[str, Times]] = {}  # by histogram, and by the value of its label
    read_bytes: dict[str, int] = {}  # by why
    hook_failures: dict[str, int] = {}  # by the setting that names the hook


class DaemonFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a daemon says about itself, and about the places of its fleet. `loop_at`: when its loop last made progress,
    in seconds since 1970."""

    loop_at: float
    counted: Counted = Counted()
    places: tuple[PlaceState, ...] = ()


class Counts(logging.Handler):
    """Counts what the daemon's log says, so that nothing else has to count. Any thread may log."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._now = Counted()

    def take(self) -> Counted:
        """Return the counts as of now."""
        self.acquire()
        try:
            return copy.deepcopy(self._now)
        finally:
            self.release()

    def emit(self, record: logging.LogRecord) -> None:
        """Count one line. The base class lets one thread at a time do it."""
        fields: Mapping[str, Any] = getattr(record, FIELDS, None) or {}
        event = record.getMessage()
        if event == "verified":
            self._verified(fields)
        elif event == "decided":
            self._took("sick_to_decision_seconds", fields["decision"], fields["seconds"])
        elif event == "unverified":
            now, url = time.time(), fields["run"]
            self._now.unverified[url] = [*_recent(self._now.unverified.get(url, ()), now), now]
        elif event == "scrubbed":
            _add(self._now.read_bytes, "scrub", fields["bytes"])
        elif event == "replicated":
            _add(self._now.read_bytes, "replicate", fields["sent"])
        elif record.levelno >= _FAILED_AT.get(event, logging.CRITICAL):
            _add(self._now.hook_failures, fields["hook"], 1)

    def _verified(self, fields: Mapping[str, Any]) -> None:
        _add(self._now.verdicts.setdefault(fields["run"], {}), fields["outcome"], 1)
        if fields["waited"] is not None:
            self._took("save_to_verdict_seconds", "", fields["waited"])
        if fields["seconds"] is None:
            return  # nothing was read
        _add(self._now.read_bytes, "verify", fields["bytes"])
        size = next(name for most, name in _SIZES if fields["bytes"] <= most)
        self._took("verify_seconds", size, fields["seconds"])

    def _took(self, histogram: str, value: str, seconds: float) -> None:
        times = self._now.times.setdefault(histogram, {}).setdefault(value, Times())
        _add(times.below, next(limit for limit in HISTOGRAMS[histogram].limits if seconds <= limit), 1)
        times.sum += seconds


def _add(sums: dict[Any, Any], key: object, value: float) -> None:
    sums[key] = sums.get(key, 0) + value


class _Family(NamedTuple):
    """One metric of each run. `name` is without ``ckptguard_``. `of` gives its value, or its values by `label`.
    `total` makes one of those of many runs; None: there is none. `alerts`: an alert is about that one, so it leaves out
    silenced runs. `calls`: any value but 0 calls somebody."""

    name: str
    help: str
    of: Callable[[RunSummary, float], Any]
    total: Callable[[Iterable[float]], float] | None = sum
    label: str | None = None
    alerts: bool = False
    calls: bool = False


_FAMILIES = (
    _Family(
        "protected", "Whether there is a known-good checkpoint with an independent copy.", lambda r, _: _protected(r)
    ),
    _Family("silenced", "Whether nobody is disturbed about the run.", lambda r, now: _is_silenced(r, now)),
    _Family(
        "failing", "Whether the run cannot be looked at.", lambda r, _: r.state == "failing", alerts=True, calls=True
    ),
    _Family("training", "Whether saves arrive.", lambda r, _: r.training),
    _Family(
        "saving_stopped",
        "Whether training goes on, and no save came for three usual intervals.",
        lambda r, _: r.saving_stopped,
        alerts=True,
        calls=True,
    ),
    _Family("known_good_step", "The step of the known-good checkpoint.", lambda r, _: r.known_good_step, None),
    _Family(
        "known_good_timestamp_seconds",
        "When the known-good checkpoint was saved. Of several runs: the oldest.",
        lambda r, _: r.known_good_at,
        min,
    ),
    _Family("save_interval_seconds", "The usual time between saves.", lambda r, _: r.save_interval, None),
    _Family("world_size", "How many GPUs train, if a record says so.", lambda r, _: r.world_size),
    _Family("at_risk_gpu_seconds", "Computing time that would be lost now.", lambda r, now: _at_risk(r, now)),
    _Family(
        "newest_bad", "Whether the newest save is bad.", lambda r, _: r.newest_outcome == "bad", alerts=True, calls=True
    ),
    _Family(
        "unfinished_newest",
        "Whether the newest save is unfinished, and has not changed for two save intervals.",
        lambda r, now: _is_late(r, now),
        alerts=True,
        calls=True,
    ),
    _Family("checkpoints", "Checkpoints on record.", lambda r, _: r.checkpoints, sum, "outcome"),
    _Family("checkpoint_bytes", "Bytes of the checkpoints on record.", lambda r, _: r.bytes, sum, "outcome"),
    _Family("growth_bytes_per_second", "By how much the run grows, by its saves on record.", lambda r, _: r.growth),
    _Family(
        "free_bytes", "Free bytes where its checkpoints are. Of several runs: the fewest.", lambda r, _: r.free, min
    ),
    _Family(
        "full_in_seconds",
        "When the disk of the run is full, as the runs there grow. Of several runs: the soonest.",
        lambda r, _: r.full_in,
        min,
        alerts=True,
    ),
    _Family("backlog_checkpoints", "Saves that wait for a verdict.", lambda r, _: r.backlog),
    _Family(
        "backlog_bytes",
        "Bytes of the saves that wait for a verdict.",
        lambda r, _: r.backlog_bytes,
        alerts=True,
    ),
    _Family(
        "backlog_oldest_timestamp_seconds",
        "When the save that waits longest for a verdict was written.",
        lambda r, _: r.waiting_since,
        min,
    ),
    _Family(
        "not_understood_files",
        "Files that may be training state, and that nothing verifies.",
        lambda r, _: r.not_understood,
    ),
    _Family(
        "unreadable_places",
        "Folders and names in the run that nobody can look at.",
        lambda r, _: r.unreadable,
        alerts=True,
        calls=True,
    ),
    _Family("without_md5_checkpoints", "Good saves whose MD5 is yet to be taken.", lambda r, _: r.without_md5),
    _Family(
        "replica_behind",
        "Good checkpoints that a replica lacks. Of several runs: the most.",
        lambda r, _: r.replicas_behind if r.replicas else None,
        max,
        alerts=True,
    ),
    _Family(
        "scrub_oldest_timestamp_seconds",
        "When the bytes that were not read for longest were last read. Of several runs: the oldest.",
        lambda r, _: r.scrubbed_at,
        min,
        alerts=True,
    ),
    _Family(
        "scrub_interval_seconds",
        "How often bytes should be read again.",
        lambda r, _: r.scrub_interval,
        min,
        alerts=True,
    ),
    _Family("incidents_total", "Incidents on record.", lambda r, _: r.incidents, sum, "cause"),
    _Family("rollbacks_total", "Rollbacks on record.", lambda r, _: r.rollbacks, sum, "cause"),
    _Family(
        "rollback_steps_saved_total",
        "Steps that rollbacks did not repeat, because training went back to a checkpoint and not to the start.",
        lambda r, _: r.steps_saved,
    ),
)


class Metrics:
    """The metrics of one daemon, for any number of threads that ask."""

    def __init__(
        self,
        runs: Callable[[], Sequence[RunSummary]],
        loop_at: Callable[[], float],
        places: Callable[[], Sequence[PlaceState]] = lambda: (),
    ) -> None:
        self._summaries, self._loop_at, self._places = runs, loop_at, places
        self._counts = Counts()
        self._lock = threading.Lock()
        self._text, self._made_at = b"", -_FRESH
        self._needed: dict[str, float] = {}  # of very many runs
        also_to(self._counts)

    def text(self) -> bytes:
        """Return all metrics as of now, or as of a moment ago."""
        with self._lock:
            if time.monotonic() - self._made_at >= _FRESH:
                counted, places = self._counts.take(), tuple(self._places())
                daemon = DaemonFacts(loop_at=self._loop_at(), counted=counted, places=places)
                runs, now = self._summaries(), time.time()
                self._needed = needed_lately(runs, self._needed, now, daemon) if len(runs) > MOST_RUNS else {}
                self._text = exposition(runs, daemon, now, self._needed)
                self._made_at = time.monotonic()
            return self._text


def exposition(
    runs: Sequence[RunSummary], daemon: DaemonFacts | None, now: float, needed: Collection[str] | None = None
) -> bytes:
    """Return all metrics in Prometheus' text format. Without `daemon`, those of the runs only.

    No two series have equal labels, whatever the runs are called. Of very many runs only the `needed` ones have series
    of their own: those that need somebody now, unless it is given. All others together have the series without a run.
    """
    return "".join(_lines(list({run.url: run for run in runs}.values()), daemon, now, needed)).encode()


def _lines(
    runs: Sequence[RunSummary], daemon: DaemonFacts | None, now: float, needed: Collection[str] | None
) -> Iterator[str]:
    # Of a run that has ended nothing is measured any more, so that no alert is about it.
    every, runs = runs, [run for run in runs if run.state != "ended"]
    states = Counter({"guarded": 0, "waiting": 0, "failing": 0, "ended": 0})
    states.update(run.state for run in every)
    causes = _shown_causes(runs)
    families: tuple[_Family, ...] = _FAMILIES
    if daemon is not None:
        states_of = [(f'state="{_quoted(state)}"', count) for state, count in sorted(states.items())]
        yield from _family("runs", "gauge", "Runs by state.", states_of)
        families = (*_FAMILIES, _verdicts(daemon.counted), _unverified(daemon.counted))
    shown, others = list(runs), list[RunSummary]()
    if len(runs) > MOST_RUNS:
        needed = needed_lately(runs, {}, now, daemon) if needed is None else needed
        shown, others = [run for run in runs if run.url in needed], [run for run in runs if run.url not in needed]
    named = list(zip(_run_labels(shown), shown, strict=True))
    loud = [run for run in others if not _is_silenced(run, now)]
    for family in families:
        is_counter = family.name.endswith("_total")
        # A counter of some runs would shrink whenever one of them gets a series of its own.
        own, rest = ([], runs) if is_counter and others else (named, loud if family.alerts else others)
        samples = _plain(family, own, rest, now) if family.label is None else _by_label(family, own, rest, now, causes)
        yield from _family(family.name, "counter" if is_counter else "gauge", family.help, samples)
    if daemon is not None:
        yield from _of_daemon(daemon)


def _plain(family: _Family, own: Sequence[_Named], rest: Sequence[RunSummary], now: float) -> Iterator[Labelled]:
    for label, run in own:
        yield label, family.of(run, now)
    values = [value for run in rest if (value := family.of(run, now)) is not None]
    if family.total is not None and values:
        yield "", family.total(values)


def _by_label(
    family: _Family, own: Sequence[_Named], rest: Sequence[RunSummary], now: float, causes: set[str]
) -> Iterable[Labelled]:
    sums: dict[str, float] = {}
    for label, run in (*((f"{label},", run) for label, run in own), *(("", run) for run in rest)):
        for name, value in family.of(run, now).items():
            shown = name if family.label != "cause" or name in causes else "other"
            _add(sums, f'{label}{family.label}="{_quoted(shown)}"', value)
    return sums.items()


def needed_lately(
    runs: Iterable[RunSummary], before: Mapping[str, float], now: float, daemon: DaemonFacts | None = None
) -> dict[str, float]:
    """Return the runs that need somebody, or did so lately, and when they did last. Of too many those stay that were
    there before, so that no alert ends because another one begins."""
    families = (*_FAMILIES, _unverified(Counted() if daemon is None else daemon.counted))
    calling = [family.of for family in families if family.calls]
    needed = {run.url: now if _needs_somebody(run, now, calling) else before.get(run.url, -_STAYS) for run in runs}
    lately = {url: at for url, at in needed.items() if now - at < _STAYS}
    first = sorted(lately, key=lambda url: (-lately[url], url not in before, url))[:MOST_RUNS]
    return {url: lately[url] for url in first}


def _needs_somebody(run: RunSummary, now: float, calling: Iterable[Callable[[RunSummary, float], Any]]) -> bool:
    """True if one of our alerts may be about the run."""
    if _is_silenced(run, now) or run.state == "ended":
        return False
    overdue = run.scrubbed_at is not None and run.scrub_interval is not None
    return (
        any(of(run, now) for of in calling)
        or _protected(run) is False
        or is_stale(run, now)
        or (run.replicas > 0 and run.replicas_behind > run.training)
        or (run.waiting_since is not None and now - run.waiting_since > _WAITS_LONG)
        or (overdue and now - (run.scrubbed_at or 0.0) > 2 * (run.scrub_interval or 0.0))
    )


def _verdicts(counted: Counted) -> _Family:
    reported = "Verdicts since the daemon started."
    return _Family("verdicts_total", reported, lambda r, _: counted.verdicts.get(r.url, {}), sum, "outcome")


def _unverified(counted: Counted) -> _Family:
    reported, when = "Saves that went without a verdict in the last hour.", counted.unverified
    return _Family(
        "unverified_saves",
        reported,
        lambda r, now: len(_recent(when.get(r.url, ()), now)),
        alerts=True,
        calls=True,
    )


def _recent(times: Iterable[float], now: float) -> list[float]:
    return [at for at in times if now - at < _HOUR]


def _of_daemon(daemon: DaemonFacts) -> Iterator[str]:
    counted = daemon.counted
    for name, histogram in HISTOGRAMS.items():
        yield from _buckets(name, histogram, counted.times.get(name, {}))
    read = [(f'why="{why}"', count) for why, count in {**dict.fromkeys(_WHY, 0), **counted.read_bytes}.items()]
    yield from _family("read_bytes_total", "counter", "Bytes of checkpoints that were read.", read)
    failures = {**dict.fromkeys(_HOOKS, 0), **counted.hook_failures}
    failed = [(f'hook="{_quoted(hook)}"', count) for hook, count in failures.items()]
    yield from _family("hook_failures_total", "counter", "Messages that did not arrive.", failed)
    places = [(f'place="{_quoted(place.folder)}"', place) for place in daemon.places]
    failing = [(f'{label},cause="{cause}"', float(place.cause == cause)) for label, place in places for cause in CAUSES]
    yield from _family("search_failing", "gauge", "Whether a place cannot be searched for runs.", failing)
    since = [(label, place.failing_since) for label, place in places]
    yield from _family("search_failing_since_timestamp_seconds", "gauge", "Since when it cannot.", since)
    yield from _family("loop_timestamp_seconds", "gauge", "When the daemon last made progress.", [("", daemon.loop_at)])
    yield from _family("build_info", "gauge", "The daemon's version.", [(f'version="{_quoted(__version__)}"', 1)])


def _buckets(name: str, histogram: _Histogram, times: Mapping[str, Times]) -> Iterator[str]:
    yield from _family(name, "histogram", histogram.help, ())
    for value in histogram.values:
        own, so_far = times.get(value, Times()), 0
        label = f'{histogram.label}="{value}"' if histogram.label else ""
        for limit in histogram.limits:
            so_far += own.below.get(limit, 0)
            le = "+Inf" if limit == _INF else f"{limit:g}"
            yield f'ckptguard_{name}_bucket{{{label}{label and ","}le="{le}"}} {so_far}\n'
        shown = f"{{{label}}}" if label else ""
        yield f"ckptguard_{name}_sum{shown} {own.sum!r}\nckptguard_{name}_count{shown} {so_far}\n"


def _family(name: str, kind: str, reported: str, samples: Iterable[Labelled]) -> Iterator[str]:
    yield f"# HELP ckptguard_{name} {reported}\n# TYPE ckptguard_{name} {kind}\n"
    for labels, value in samples:
        if value is not None:
            yield (
                f"ckptguard_{name}{{{labels}}} {float(value)!r}\n" if labels else f"ckptguard_{name} {float(value)!r}\n"
            )


def _protected(run: RunSummary) -> bool | None:
    return None if run.state == "waiting" and not run.checkpoints else run.protected  # it never was there


def _is_silenced(run: RunSummary, now: float) -> bool:
    return run.silence is not None and run.silence.holds(now)


def _is_late(run: RunSummary, now: float) -> bool:
    left = None if run.unfinished_since is None else late_in(now - run.unfinished_since, run.save_interval)
    return left is not None and left <= 0


def _at_risk(run: RunSummary, now: float) -> float | None:
    found = at_risk(run, now)
    return found.gpu_seconds if found is not None else None if run.training else 0.0


def _run_labels(runs: Sequence[RunSummary]) -> list[str]:
    shown = [_quoted(run.url) for run in runs]
    often = Counter(shown)
    for place, run in enumerate(runs):
        if often[shown[place]] > 1:  # names that look the same once they are escaped
            shown[place] = f"{shown[place]} ({run_id_of(run.url)})"
    more = ("".join(f',{name}="{_quoted(value)}"' for name, value in run.labels.items()) for run in runs)
    return [f'run="{label}"{labels}' for label, labels in zip(shown, more, strict=True)]


def _shown_causes(runs: Sequence[RunSummary]) -> set[str]:
    """Anybody who reports an incident names its cause, so only the most frequent ones become labels."""
    counts: Counter[str] = Counter()
    for run in runs:
        for causes in (run.incidents, run.rollbacks):
            counts.update({cause: count for cause, count in causes.items() if _CAUSE.fullmatch(cause)})
    return {cause for cause, _ in counts.most_common(_MOST_CAUSES)}


@functools.lru_cache(4 * MOST_RUNS)
def _quoted(text: str) -> str:
    return escape(text).replace("\\", r"\\").replace('"', r"\"")
