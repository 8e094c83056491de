"""Put a thinned checkpoint back as it was, from the trash, where nothing else is left to go back to."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import msgspec
from msgspec.structs import replace

from ckptguard.records.trash import Trashed, list_trashed, read_trashed
from ckptguard.retention.trash import undo_thinning
from ckptguard.runs.file_signatures import as_reported
from ckptguard.runs.find_known_good import Wanted, known_good_candidates
from ckptguard.runs.run_view import RunView
from ckptguard.runs.work import Work
from ckptguard.storage.protocol import Entry
from ckptguard.values.manifest import File, Manifest, Seen
from ckptguard.verification.checkpoint import Verification, verify_checkpoint
from ckptguard.verification.collect_evidence import copy_differs
from ckptguard.version import __version__


def make_whole_again(view: RunView, wanted: Wanted, work: Work) -> str:
    """Put the best thinned checkpoint that `wanted` describes back in place as it was saved, if the trash has all of it
    and its bytes are right. It is read there first, and is a generation of its own. Returns its path, "" if there is
    none. The caller holds the run's lock. Raises CouldNotTellError if something cannot be read or moved.
    """
    for mark, whole in whole_in_trash(view, wanted):
        if copy_differs(view.run.records, f"{mark.folder}/", whole, scanner=work.scanner) is not None:
            continue
        checkpoint = view.checkpoint(mark.path)
        if checkpoint is None:
            continue
        marked = {one[0]: one for one in mark.signature}
        back = replace(
            whole,
            generation=view.new_id(checkpoint).generation,
            version=__version__,
            nonce=uuid.uuid4().hex,
            files=tuple(_as_marked(file, marked[file.path]) for file in whole.files),
        )
        undo_thinning(view.run, mark, back)
        view.forget()
        now = view.checkpoint(mark.path)
        if now is not None:
            verify_checkpoint(view, now, Verification(md5=False), work=work)
        view.forget()
        return mark.path
    return ""


def whole_in_trash(view: RunView, wanted: Wanted) -> Iterator[tuple[Trashed, Manifest]]:
    """Yield the thinned checkpoints whose whole one is good and in the trash, best first."""
    run, history = view.run, view.history
    marks = [mark for id in list_trashed(run) if (mark := read_trashed(run, id)) is not None and mark.becomes]
    for candidate in known_good_candidates(view, replace(wanted, thinned=True)) if marks else ():
        for mark in marks:
            whole = history.manifest(mark.id)
            made = msgspec.structs.replace(mark.id, generation=mark.becomes)
            if candidate.in_place and made == candidate.id and whole is not None and history.is_good(mark.id):
                yield mark, whole


def _as_marked(file: File, marked: Seen) -> File:
    """Return a file as it was described when it was taken."""
    _, size, mtime_ns, inode, etag = marked
    return as_reported(file, Entry(key=file.path, kind="file", size=size, mtime_ns=mtime_ns, inode=inode, etag=etag))
