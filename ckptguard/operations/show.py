"""Show: one checkpoint, as its manifest and its verdicts describe it."""

from __future__ import annotations

import msgspec

from ckptguard.config import Settings
from ckptguard.errors import NotFoundError
from ckptguard.known_good import parse_verdict_name
from ckptguard.manifest import Manifest
from ckptguard.names import checkpoint_id
from ckptguard.operations.history import load_history
from ckptguard.operations.target import resolve_target
from ckptguard.operations.verify_target import read_reference
from ckptguard.records.run import Run
from ckptguard.verdict import Outcome, Verdict


class VerdictLine(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the ledger for a generation, by its name."""

    number: int
    outcome: Outcome


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint's manifest, its current verdict and its history. `sealed` is false for a stray one: then the
    manifest was made on the spot, from its structure, and there is no verdict."""

    target: str
    id: str | None
    sealed: bool
    manifest: Manifest
    verdict: Verdict | None
    history: tuple[VerdictLine, ...]


def show(target: str, settings: Settings) -> Shown:
    """Describe a checkpoint. NotFoundError for a run, or for what is no checkpoint; a checkpoint of a run that was
    never verified is described from its structure."""
    resolved = resolve_target(target, records=settings.records, patterns=settings.patterns)
    checkpoint = resolved.checkpoint
    if checkpoint is None:
        raise NotFoundError(f"{target} is a run", hint=f"ckptguard list {target}")
    run: Run | None = resolved.run
    if run is not None:
        history = load_history(run)
        key = history.current(checkpoint.series, checkpoint.step, checkpoint.path)
        manifest = history.manifest(checkpoint.series, key) if key else None
        if key is not None and manifest is not None:
            entries = (parse_verdict_name(n) for n in history.names.get(checkpoint.series, ()))
            lines = sorted(
                (e.number, e.outcome.value) for e in entries if e is not None and (e.step, e.generation) == key
            )
            return Shown(
                target=resolved.url,
                id=checkpoint_id(*key),
                sealed=True,
                manifest=manifest,
                verdict=history.verdict(checkpoint.series, key),
                history=tuple(VerdictLine(number=n, outcome=Outcome(o)) for n, o in lines),
            )
    manifest = read_reference(target, settings)
    return Shown(target=resolved.url, id=None, sealed=False, manifest=manifest, verdict=None, history=())
