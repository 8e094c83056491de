"""The JSON documents about replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckptguard.cli.documents import Document, document

if TYPE_CHECKING:
    from ckptguard.replicas.replicate import Replica
    from ckptguard.replicas.start_run import Started


def replicate_document(target: str, replicas: Sequence[Replica], *, dry_run: bool) -> Document:
    """The answer of `replicate`."""
    return document("replicate", target=target, dry_run=dry_run, replicas=list(replicas))


def started_document(started: Started) -> Document:
    """The answer of `restore --as-run`: the same as of any restore."""
    return document(
        "restore",
        target=started.source,
        path=started.path,
        series=started.series,
        step=started.step,
        id=started.id,
        outcome="good",
        bytes=started.bytes,
        kept=False,
        source=started.source,
    )
