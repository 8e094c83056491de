"""The checkpoints of a run as storage shows them now."""

from __future__ import annotations

from ckptguard.errors import NotFoundError
from ckptguard.layouts import Checkpoint, enter, find_checkpoints
from ckptguard.names import parse_id
from ckptguard.records.run import Run


def list_checkpoints(run: Run) -> list[Checkpoint]:
    """All checkpoints in place, sorted by path. A failed listing raises: it never reads as "nothing here"."""
    return find_checkpoints(run.storage.list("", recursive=True, enter=enter))


def find_checkpoint(run: Run, path: str) -> Checkpoint | None:
    """The checkpoint in place under exactly this path."""
    return next((c for c in list_checkpoints(run) if c.path == path), None)


def select_checkpoint(run: Run, word: str) -> Checkpoint:
    """The checkpoint in place that a user means by a path, an id or a step; NotFoundError if there is none."""
    checkpoints = list_checkpoints(run)
    name = word.rstrip("/").removeprefix(run.url.rstrip("/") + "/")
    chosen = [c for c in checkpoints if c.path == name]
    if not chosen:
        parsed = parse_id(word)
        step = parsed[0] if parsed else int(word) if word.isascii() and word.isdigit() else None
        chosen = [c for c in checkpoints if step is not None and c.step == step]
    if len(chosen) > 1:
        paths = ", ".join(c.path for c in chosen)
        raise NotFoundError(f"{word} may mean any of {paths}", hint="name it by its path")
    if not chosen:
        raise NotFoundError(f"there is no checkpoint {word} in {run.url}")
    return chosen[0]
