"""Undo what the last rollback rewrote: pointers and links hold exactly what they held before."""

from __future__ import annotations

import msgspec

from ckptguard.errors import NotFoundError
from ckptguard.records.rewrites import last_rewrites, mark_undone
from ckptguard.runs.lock import run_lock
from ckptguard.runs.pointers import put_back_pointers
from ckptguard.runs.run_view import RunView


class Undone(msgspec.Struct, frozen=True, kw_only=True):
    """The pointers that were put back, and those that were changed since the rollback, which stay."""

    pointers: tuple[str, ...]
    left: tuple[str, ...]


def undo_pointers(view: RunView) -> Undone:
    """Put back the pointers and links that the last rollback rewrote. A second call goes one rollback further back.

    Raises NotFoundError if there is nothing to undo.
    """
    run = view.run
    with run_lock(run):
        rewrites = last_rewrites(run)
        if rewrites is None:
            raise NotFoundError(f"no rollback of {run.url} rewrote a pointer, or all were undone")
        done, left = put_back_pointers(run, rewrites.pointers)
        mark_undone(run, rewrites)
    view.forget()
    return Undone(pointers=tuple(done), left=tuple(left))
