"""Sums: the recorded MD5 of every file of a checkpoint; outside a run, the current MD5."""

from __future__ import annotations

import shlex

import msgspec

from ckptguard.checks.digests import same_content
from ckptguard.errors import RefusedError
from ckptguard.inspect.tensor_table import TensorSource, find_source
from ckptguard.records.after_seal import read_late_md5s
from ckptguard.runs.work import PLAIN, Work
from ckptguard.scan import ScanOptions
from ckptguard.values.ids import CheckpointId
from ckptguard.values.manifest import Manifest
from ckptguard.values.settings import Settings


class FileSum(msgspec.Struct, frozen=True, kw_only=True):
    """One file. `path` is relative to the folder of the sums."""

    path: str
    size: int
    md5: str


class Sums(msgspec.Struct, frozen=True, kw_only=True):
    """The sums of one checkpoint. Paths are relative to `folder`: the checkpoint, or the folder of a single file.

    `recorded`: they are those of the sealed bytes, whatever the files hold now. `left_out` names what is not a regular
    file.
    """

    target: str
    folder: str
    id: CheckpointId | None
    recorded: bool
    files: tuple[FileSum, ...]
    left_out: tuple[str, ...]


def sums(target: str, settings: Settings, *, work: Work = PLAIN) -> Sums:
    """Return the MD5 of each file of a checkpoint: the recorded one without reading, else computed now.

    A sealed file without an MD5 is read, and compared with its sealed digests.

    Raises:
        RefusedError: a file differs from the sealed one.
        NotFoundError: the target is a run.
    """
    source = find_source(target, settings)
    checkpoint, sealed = source.checkpoint, source.sealed
    single = checkpoint.path in checkpoint.files
    if sealed is not None:
        sizes = {f.path: f.size for f in sealed.files}
        digests = _recorded(source, sealed, work)
    else:
        found = work.scanner(source.storage, checkpoint.files, ScanOptions(md5=True), work.progress).files
        sizes = {f.entry.key: f.entry.size for f in found}
        digests = {f.entry.key: f.md5 or "" for f in found}
    names = {key: key.rpartition("/")[2] if single else checkpoint.inside(key) for key in sorted(digests)}
    return Sums(
        target=source.url,
        folder=source.url.rpartition("/")[0] or "/" if single else source.url,
        id=source.id,
        recorded=sealed is not None,
        files=tuple(FileSum(path=name, size=sizes[key], md5=digests[key]) for key, name in names.items()),
        left_out=tuple(checkpoint.inside(e.key) for e in checkpoint.irregular),
    )


def _recorded(source: TensorSource, sealed: Manifest, work: Work) -> dict[str, str]:
    digests = {f.path: f.md5 for f in sealed.files if f.md5 is not None}
    if source.run is not None and source.id is not None and len(digests) < len(sealed.files):
        digests |= read_late_md5s(source.run, source.id)
    missing = [f for f in sealed.files if f.path not in digests]
    scanned = work.scanner(source.storage, [f.path for f in missing], ScanOptions(md5=True), work.progress).files
    for file, found in zip(missing, scanned, strict=True):
        if found.md5 is None or not same_content(file, found):
            raise RefusedError(
                f"{file.path} differs from the sealed file, and its MD5 was not recorded",
                outcome="bad",
                hint=f"ckptguard verify {shlex.quote(source.url)}",
            )
        digests[file.path] = found.md5
    return digests


def check_line(digest: str, path: str) -> str:
    """Return one line in md5sum's form. A name with a backslash or a line end is escaped, and the line marks that."""
    escaped = path.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    mark = "\\" if escaped != path else ""
    return f"{mark}{digest}  {escaped}"
