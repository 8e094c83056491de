"""The heat map: the magnitudes of tensors over checkpoints, from manifests and verdicts. No tensor is read."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ckptguard.checks.finite import counts_in
from ckptguard.documents.build import Document, document
from ckptguard.engine.watched_run import WatchedRun
from ckptguard.errors import CkptguardError, NotFoundError, RecordsError
from ckptguard.records.manifests import read_manifest
from ckptguard.runs.run_view import RunView
from ckptguard.values.ids import MAX_STEP, CheckpointId, escape
from ckptguard.values.manifest import Manifest
from ckptguard.values.remembered import Remembered
from ckptguard.values.run_rows import Generation
from ckptguard.values.verdict import Outcome, Severity
from ckptguard_daemon.dashboard.one_checkpoint import judgement_of, sick_tensors
from ckptguard_daemon.http.replies import number
from ckptguard_daemon.http.routes import Role, Route, Served
from ckptguard_daemon.reading import Reads, counted_view

MOST = 120  # checkpoints in one answer
_MOST_CELLS = 300_000
_MEMORY = 64 << 20
_READERS = 8
_FIRST = ("model", "ema", "optimizer")  # a sick model makes a sick optimizer more often than the reverse
_NAN = float("nan")  # unknown

Named = tuple[str, str, str]  # role, name and dtype of a tensor


class Column(msgspec.Struct, frozen=True):
    """What the records of one checkpoint say about its tensors. `sick` has the words for those that are not well."""

    tensors: tuple[Named, ...]
    largest: array[float]
    rms: array[float]
    sick: dict[int, str]

    @property
    def size(self) -> int:
        """About how many bytes it takes. Its names are shared with other columns."""
        return 500 + 16 * len(self.tensors) + 200 * len(self.sick)


def routes(served: Served) -> list[Route]:
    """Return the routes of this module."""
    heat = Heat(served)

    async def answer(request: Request) -> Response:
        run = served.run_of(request)
        series = request.query_params.get("series")
        first, last = (number(request, name, int, MAX_STEP) for name in ("first", "last"))
        most = min(number(request, "most", int, 1e9) or MOST, MOST)
        return await served.clicks.answer(request, lambda reads: heat.document(run, series, (first, last), most, reads))

    return [Route("/v1/runs/{run}/heat", answer, Role.READER)]


class Heat:
    """Heat maps of the daemon's runs. What manifests say is remembered."""

    def __init__(self, served: Served) -> None:
        self._feed = served.feed
        self._columns = Remembered(_MEMORY)
        self._names = Remembered(_MEMORY // 4)

    def document(
        self,
        watched: WatchedRun,
        series: str | None,
        between: tuple[int | None, int | None],
        most: int,
        reads: Reads,
    ) -> Document:
        """Return the document. Raises NotFoundError if the run has no such series."""
        noted = self._feed.catalogue.noted(watched.run_id)
        every = {g.id: g for g in noted.generations.values()} if noted is not None else {}
        known = sorted({escape(id.series) for id in every})
        if series is None and known:
            series = escape(max(every, key=lambda id: (every[id].saved_at or 0.0, id.order)).series)
        own = sorted((id for id in every if escape(id.series) == series), key=lambda id: id.order)
        if not own:
            raise NotFoundError(f"no checkpoint of {watched.url} is on record in this series")
        first, last = between
        inside = [id for id in own if _is_between(id, first, last)]
        shown = choose([every[id].outcome for id in inside], most)
        chosen = [inside[place] for place in shown]
        columns = self._columns_of(watched, [every[id] for id in chosen], reads)
        before = own.index(inside[0]) if inside else 0
        return {
            **document("heat", run=watched.run_id),
            "series": series,
            "every_series": known,
            "checkpoints": [
                {
                    "name": id.record_path,
                    "step": id.step,
                    "id": str(id),
                    "outcome": every[id].outcome,
                    "problem": None if isinstance(column, Column) else column,
                }
                for id, column in zip(chosen, columns, strict=True)
            ],
            **_cells([c if isinstance(c, Column) else None for c in columns]),
            "more": {"before": before, "after": len(own) - before - len(inside), "between": len(inside) - len(shown)},
        }

    def _columns_of(self, watched: WatchedRun, rows: Sequence[Generation], reads: Reads) -> list[Column | str]:
        """Return what the records of some checkpoints say; a sentence for one that cannot be read."""
        keys = [(watched.run_id, row.name, row.verdict, row.outcome, row.saved_at, row.judged_at) for row in rows]
        found = [self._columns.get(key) for key in keys]
        missing = [place for place, column in enumerate(found) if column is None]
        if not missing:
            return found
        view = counted_view(watched, reads)

        def read(place: int) -> None:
            try:
                found[place] = column = self._read(view, rows[place])
                self._columns.put(keys[place], column, column.size)
            except CkptguardError as error:
                found[place] = escape(error.message)

        with ThreadPoolExecutor(_READERS, "heat") as readers:
            list(readers.map(read, missing))
        return found

    def _read(self, view: RunView, row: Generation) -> Column:
        manifest = read_manifest(view.run, row.id)
        if manifest is None:
            raise RecordsError("its manifest is missing")
        verdict = None
        if row.outcome not in (Outcome.GOOD.value, Outcome.PENDING.value):
            verdict = judgement_of(view.run, row.id, manifest).counts
        bad = {at: f for at, f in sick_tensors(verdict).items() if f.severity is Severity.ERROR}
        sick = {at: counts_in(f.message) or f.message for at, f in bad.items()}
        return self._column(manifest, {at: _words(found) for at, found in sick.items()})

    def _column(self, manifest: Manifest, sick: dict[tuple[str, str], str]) -> Column:
        every = [(file, tensor) for file in manifest.files for tensor in file.tensors]
        named = tuple((t.role, t.name, t.dtype) for _, t in every)
        shared = self._names.get(named)
        if shared is None:
            self._names.put(named, named, sum(200 + len(name) for _, name, _ in named))
        return Column(
            tensors=shared or named,
            largest=array("d", [_NAN if t.largest is None else t.largest for _, t in every]),
            rms=array("d", [_NAN if t.rms is None else t.rms for _, t in every]),
            sick={
                place: words
                for place, (file, tensor) in enumerate(every)
                if (words := sick.get((file.path, tensor.name))) is not None
            },
        )


def choose(outcomes: Sequence[str], most: int) -> list[int]:
    """Return the places of at most `most` checkpoints: the bad ones and those beside them, and others evenly.

    If the bad ones alone are too many, the first ones count.
    """
    if len(outcomes) <= most:
        return list(range(len(outcomes)))
    bad = [place for place, outcome in enumerate(outcomes) if outcome not in (Outcome.GOOD, Outcome.PENDING)]
    wanted: dict[int, None] = dict.fromkeys((len(outcomes) - 1, 0)[:most])
    for place in bad:
        near = [one for one in (place - 1, place, place + 1) if 0 <= one < len(outcomes) and one not in wanted]
        if len(wanted) + len(near) > most - most // 3:  # a third is for the others
            break
        wanted.update(dict.fromkeys(near))
    left = [place for place in range(len(outcomes)) if place not in wanted]
    room = most - len(wanted)
    wanted.update(dict.fromkeys(left[int((n + 0.5) * len(left) / room)] for n in range(room)))
    return sorted(wanted)


def _is_between(id: CheckpointId, first: int | None, last: int | None) -> bool:
    numbers = id.order[0]
    leading = numbers[0] if numbers else None
    return leading is None or ((first is None or leading >= first) and (last is None or leading <= last))


def _words(found: tuple[int, int] | str) -> str:
    if isinstance(found, str):
        return escape(found[:200])
    return ", ".join(f"{count} {word}" for count, word in zip(found, ("NaN", "Inf"), strict=True) if count)


def _cells(columns: Sequence[Column | None]) -> Document:
    """Return the matrix: a row for each tensor, a number or null for each checkpoint."""
    places: dict[tuple[str, str], int] = {}
    dtypes: list[str] = []
    numbered: dict[int, list[int]] = {}  # the rows of a column's tensors; most columns share their names
    for column in columns:
        if column is None or id(column.tensors) in numbered:
            continue
        own = numbered[id(column.tensors)] = []
        seen: dict[tuple[str, str], int] = {}
        for role, name, dtype in column.tensors:
            nth = seen[role, name] = seen.get((role, name), -1) + 1
            key = (role, f"{name} ({nth + 1})" if nth else name)  # one of each rank
            if key not in places:
                places[key] = len(dtypes)
                dtypes.append(dtype)
            own.append(places[key])
    sick = {numbered[id(column.tensors)][place] for column in columns if column for place in column.sick}
    order = sorted(places.items(), key=lambda one: (one[1] not in sick, one[1]))
    kept = sorted(place for _, place in order[: max(1, _MOST_CELLS // max(1, len(columns)))])
    at = {place: number for number, place in enumerate(kept)}
    picked: dict[int, list[int]] = {}  # where each row is in a column; -1: after its end, which is unknown
    for tensors, own in numbered.items():
        of_row = {row: place for place, row in enumerate(own)}
        picked[tensors] = [of_row.get(row, -1) for row in kept]
    largest: list[list[float]] = []
    rms: list[list[float]] = []
    bad: list[tuple[int, int, str]] = []
    for c, column in enumerate(columns):
        if column is None:
            largest.append([_NAN] * len(kept))
            rms.append([_NAN] * len(kept))
            continue
        own, places_in = numbered[id(column.tensors)], picked[id(column.tensors)]
        for values, into in ((column.largest, largest), (column.rms, rms)):
            padded = [*values, _NAN]
            into.append([padded[place] for place in places_in])
        bad += [(at[own[place]], c, words) for place, words in column.sick.items() if own[place] in at]
    names = list(places)
    return {
        "tensors": [{"name": escape(names[p][1]), "role": names[p][0], "dtype": escape(dtypes[p])} for p in kept],
        "largest": list(zip(*largest, strict=True)),  # NaN, which is unknown, is written as null
        "rms": list(zip(*rms, strict=True)),
        "bad": bad,
        "first_bad": first_bad([(names[kept[t]][0], t, c) for t, c, _ in bad]),
        "tensors_omitted": len(places) - len(kept),
    }


def first_bad(cells: Iterable[tuple[str, int, int]]) -> tuple[int, int] | None:
    """Return the tensor and the checkpoint of the first bad cell, given the role and the place of each."""
    rank = {role: place for place, role in enumerate(_FIRST)}
    found = min(((c, rank.get(role, len(rank)), t) for role, t, c in cells), default=None)
    return None if found is None else (found[2], found[0])
