"""One checkpoint, as its manifest and its verdicts describe it: files, tensors, and its shards by rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ckptguard.checks.finite import counts_in
from ckptguard.decisions.known_good import current_verdicts, verdict_name
from ckptguard.documents.build import Document, document, fields, plain
from ckptguard.engine.watched_run import WatchedRun
from ckptguard.formats.dtypes import FP16_LIMIT
from ckptguard.layouts.rank_names import rank_named, ranks_named
from ckptguard.records.ledger import FOLDER as LEDGER
from ckptguard.records.manifests import read_manifest
from ckptguard.records.run import Run, record_names
from ckptguard.records.who_and_when import seconds_of
from ckptguard.reporting.events import reason_of
from ckptguard.runs.history import History
from ckptguard.runs.run_view import RunView
from ckptguard.values.ids import CheckpointId, escape, series_folder
from ckptguard.values.manifest import File, Manifest, Tensor
from ckptguard.values.verdict import Finding, Outcome, Severity, Verdict
from ckptguard_daemon.http.routes import Role, Route, Served
from ckptguard_daemon.reading import Reads, counted_view, id_of, unknown

_MOST_VERDICTS = 20
_MOST_TENSORS = 20_000
_WEIGHTY = (Severity.ERROR, Severity.SICKNESS)
_LONGEST = 1000  # characters of a note


class Judgement(msgspec.Struct, frozen=True):
    """The verdicts on one generation, the newest last, and the one that counts."""

    counts: Verdict | None
    verdicts: tuple[tuple[str, Verdict], ...] = ()
    omitted: int = 0


def routes(served: Served) -> list[Route]:
    """Return the routes of this module."""

    async def checkpoint(request: Request) -> Response:
        run, id = served.run_of(request), id_of(request)
        return await served.clicks.answer(request, lambda reads: _checkpoint(run, id, reads))

    async def shards(request: Request) -> Response:
        run, id = served.run_of(request), id_of(request)
        return await served.clicks.answer(request, lambda reads: _shards(run, id, reads))

    run = "/v1/runs/{run}"
    return [Route(f"{run}/checkpoint", checkpoint, Role.READER), Route(f"{run}/shards", shards, Role.READER)]


def sealed_and_judged(view: RunView, id: CheckpointId) -> tuple[Manifest | None, Judgement]:
    """Return the manifest of a generation and its newest verdicts. Raises NotFoundError if there is neither."""
    manifest = read_manifest(view.run, id)
    judgement = judgement_of(view.run, id, manifest)
    if manifest is None and judgement.counts is None:
        raise unknown(id, view.run)
    return manifest, judgement


def judgement_of(run: Run, id: CheckpointId, manifest: Manifest | None) -> Judgement:
    """Return the newest verdicts on a generation, whose manifest was read."""
    folder = f"{LEDGER}/{series_folder(id.series)}"
    history = History(run, (f"{folder}/{name}" for name in record_names(run, folder)))
    if manifest is not None:
        history.note_manifest(manifest)
    entries = history.entries(id)
    names = sorted(entries)
    read = ((name, history.entry(entries[name], name)) for name in names[-_MOST_VERDICTS:])
    found = {name: verdict for name, verdict in read if verdict is not None}
    current_verdict = current_verdicts(id.series, found).get(id)
    counts = found[verdict_name(current_verdict)] if current_verdict is not None else None
    return Judgement(counts=counts, verdicts=tuple(found.items()), omitted=max(0, len(names) - _MOST_VERDICTS))


def sick_tensors(verdict: Verdict | None) -> dict[tuple[str, str], Finding]:
    """Return the heaviest finding about each tensor of a verdict, by file and name."""
    found: dict[tuple[str, str], Finding] = {}
    for finding in verdict.findings if verdict is not None else ():
        if finding.tensor is not None and finding.severity in _WEIGHTY:
            found.setdefault((finding.file or "", finding.tensor), finding)
    return found


def inside(path: str, manifest: Manifest) -> str:
    """Return a file's path within its checkpoint."""
    return path.rpartition("/")[2] if path == manifest.path else path.removeprefix(f"{manifest.path}/")


def tensor_fields(tensor: Tensor, file: File, manifest: Manifest, finding: Finding | None) -> Document:
    """Return a tensor as the documents show it. `nan` and `inf` are null unless a verdict counted them."""
    counted = counts_in(finding.message) if finding is not None and finding.check == "finite" else None
    return {
        "name": escape(tensor.name),
        "role": tensor.role,
        "dtype": escape(tensor.dtype),
        "shape": tensor.shape,
        "file": escape(inside(file.path, manifest)),
        "digest": None if tensor.span is None else file.spans[tensor.span].blake3,
        "bytes": None if tensor.span is None else file.spans[tensor.span].length,
        "largest": tensor.largest,
        "rms": tensor.rms,
        "zeros": tensor.zeros,
        "nan": None if counted is None else counted[0],
        "inf": None if counted is None else counted[1],
        "headroom": None if tensor.largest is None else tensor.largest / FP16_LIMIT,
        "problem": None if finding is None else escape(finding.message),
    }


def side_fields(id: CheckpointId, manifest: Manifest | None, verdict: Verdict | None) -> Document:
    """Return what says which checkpoint it is, and what it is worth."""
    outcome = Outcome.PENDING if verdict is None else verdict.outcome
    return {
        "name": id.record_path,
        "path": None if manifest is None else escape(manifest.path),
        "series": escape(id.series),
        "step": id.step,
        "id": str(id),
        "outcome": outcome.value,
        "sentence": sentence_of(verdict),
    }


def sentence_of(verdict: Verdict | None) -> str:
    """Say what the verdict on a checkpoint is, and why."""
    if verdict is None:
        return "pending: no verdict on it can be read"
    reason = reason_of(verdict)
    if verdict.outcome is Outcome.GOOD:
        return f"good: {reason}" if reason else "good: every check passed"
    return f"{verdict.outcome.value}: {reason}" if reason else verdict.outcome.value


def _checkpoint(watched: WatchedRun, id: CheckpointId, reads: Reads) -> Document:
    view = counted_view(watched, reads)
    manifest, judged = sealed_and_judged(view, id)
    files = manifest.files if manifest is not None else ()
    sick = sick_tensors(judged.counts)
    every = [(t, f) for f in files for t in f.tensors]
    if len(every) > _MOST_TENSORS:  # the sick ones first, so that none of them is left out
        every.sort(key=lambda one: (one[1].path, one[0].name) not in sick)
    return {
        **document("checkpoint", run=watched.run_id),
        **side_fields(id, manifest, judged.counts),
        "layout": None if manifest is None else manifest.layout,
        "digest_origin": None if manifest is None else manifest.digest_origin,
        "sealed_at": None if manifest is None else escape(manifest.sealed_at),
        "bytes": None if manifest is None else manifest.bytes,
        "counters": [] if manifest is None else plain(manifest.counters),
        "metrics": {} if manifest is None else {**manifest.metrics, **manifest.nonfinite_metrics},
        "files": [_file_fields(f, manifest) for f in files] if manifest is not None else [],
        "tensors": [
            tensor_fields(t, f, manifest, sick.get((f.path, t.name)))
            for t, f in every[:_MOST_TENSORS]
            if manifest is not None
        ],
        "tensors_omitted": max(0, len(every) - _MOST_TENSORS),
        "verdicts": [_verdict_fields(name, v, v is judged.counts) for name, v in judged.verdicts],
        "verdicts_omitted": judged.omitted,
    }


def _file_fields(file: File, manifest: Manifest) -> Document:
    return {
        "path": escape(inside(file.path, manifest)),
        "size": file.size,
        "format": escape(file.format),
        "digest": file.envelope,
        "md5": file.md5,
        "tensors": len(file.tensors),
        "rank": rank_named(file.path)[0],
    }


def _verdict_fields(name: str, verdict: Verdict, counts: bool) -> Document:
    return {
        "name": name,
        "at": seconds_of(verdict.checked_at),
        "outcome": verdict.outcome.value,
        "by": f"ckptguard {escape(verdict.version)}",
        "counts": counts,
        "place_damaged": verdict.place_damaged,
        "seconds": verdict.seconds,
        "digests": verdict.digests,
        "findings": [_finding_fields(finding) for finding in verdict.findings],
    }


def _finding_fields(finding: Finding) -> Document:
    texts = {key: escape(text) for key in ("message", "file", "tensor") if (text := getattr(finding, key)) is not None}
    return {**fields(finding), **texts}


def _shards(watched: WatchedRun, id: CheckpointId, reads: Reads) -> Document:
    manifest, judged = sealed_and_judged(counted_view(watched, reads), id)
    weighty = [f for f in (judged.counts.findings if judged.counts is not None else ()) if f.severity in _WEIGHTY]
    files = manifest.files if manifest is not None else ()
    wrong: defaultdict[str, list[Finding]] = defaultdict(list)
    for finding in weighty:
        wrong[finding.file or ""].append(finding)
    others = [
        escape(f.message) for path, found in wrong.items() if not any(path == f.path for f in files) for f in found
    ]
    # A file without a finding is good if no finding may be about it.
    fine = Outcome.PENDING if judged.counts is None or others else Outcome.GOOD
    shards = [_shard(f, manifest, wrong.get(f.path, []), fine) for f in files if manifest is not None]
    stated = judged.counts.facts.world_size if judged.counts is not None else None
    return {
        **document("shards", run=watched.run_id),
        **side_fields(id, manifest, judged.counts),
        "world_size": stated or ranks_named(f.path for f in files),
        "files": shards,
        "others": others,
    }


def _shard(file: File, manifest: Manifest, wrong: Sequence[Finding], fine: Outcome) -> Document:
    path = inside(file.path, manifest)
    rank, kind = rank_named(path)
    errors = any(f.severity is Severity.ERROR for f in wrong)
    return {
        "path": escape(path),
        "rank": rank,
        "kind": escape(kind),
        "size": file.size,
        "format": escape(file.format),
        "tensors": len(file.tensors),
        "roles": sorted({tensor.role for tensor in file.tensors if tensor.role}),
        "outcome": Outcome.BAD if errors else Outcome.SUSPECT if wrong else fine,
        "note": escape("; ".join(f.message for f in wrong)[:_LONGEST]) or None,
    }
