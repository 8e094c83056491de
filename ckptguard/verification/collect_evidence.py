"""One pass over a checkpoint's bytes, and the evidence from it: the first step of every verification."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ckptguard.checks import Evidence
from ckptguard.checks.digests import same_content
from ckptguard.checks.evidence import KnownFacts
from ckptguard.errors import ChangedWhileReadError, DeniedError, ObjectMissingError
from ckptguard.formats import tensor_suffix
from ckptguard.formats.table import is_dcp_metadata, may_hold_state, suffixes_of
from ckptguard.layouts import LAYOUTS, Checkpoint, Gap
from ckptguard.layouts.roles import STATE_ROLES, assign_roles, file_role, is_float_matrix
from ckptguard.runs.file_signatures import is_same_file
from ckptguard.runs.work import PLAIN, Work
from ckptguard.scan import Scanner, ScanOptions, digest_places, scan_files
from ckptguard.scan.result import Scan, ScannedFile
from ckptguard.storage import Storage
from ckptguard.storage.protocol import UNNAMED, Entry
from ckptguard.values.ids import escape
from ckptguard.values.manifest import Counter, File, Manifest, Seen, Span, Tensor
from ckptguard.values.record_formats import MANIFEST
from ckptguard.values.settings import Settings

NOTHING_KNOWN = KnownFacts()
_OURS = (".safetensors", ".json", ".pt", ".bin", ".distcp", ".metadata")  # what nearly every file ends in
# Small files whose content a layout's gaps depend on.
_READ_AHEAD = (".index.json", "config.json", "trainer_state.json", "latest", ".yaml", ".metadata", ".distcp")
_ARCHIVES = ("torch_zip", "safetensors", "zip", "tar", "gguf", "hdf5")  # formats that show if a part is missing


def unfinished_because(storage: Storage, checkpoint: Checkpoint, *, scanner: Scanner = scan_files) -> str | None:
    """Return why a checkpoint is not finished, or None if it is."""
    return completeness(storage, checkpoint, scanner=scanner)[0]


def completeness(storage: Storage, checkpoint: Checkpoint, *, scanner: Scanner = scan_files) -> tuple[str | None, bool]:
    """Return why a checkpoint is not finished, or None; and whether its layout proves that nothing more will come.

    Only names and file structures are used. Problems that time cannot fix (a wrong CRC) do not count: the scan judges
    them.
    """
    if checkpoint.unread is not None:
        return f"it could not be read: {checkpoint.unread}", False
    path = checkpoint.path
    names = [e for e in checkpoint.entries if e.key == path or tensor_suffix(e.key) or e.name.endswith(_READ_AHEAD)]
    try:
        scan = scanner(storage, [e.key for e in names], ScanOptions(structure_only=True), None)
    except (ObjectMissingError, ChangedWhileReadError) as error:
        return f"{checkpoint.inside(error.key)} is being replaced", False
    structures = {f.entry.key: f.structure for f in scan.files}
    for key, structure in structures.items():
        if structure.truncated:
            return f"{checkpoint.inside(key)} is not complete yet", False
    layout = LAYOUTS[checkpoint.layout]
    gaps = [Gap("not there", file) for file in checkpoint.missing]
    gaps += [g for g in layout.gaps(checkpoint, structures) if g.fatal]
    if gaps:
        where = "" if gaps[0].file is None else f"{checkpoint.inside(gaps[0].file)}: "
        return where + gaps[0].message, False
    if checkpoint.files == (checkpoint.path,):
        return None, any(s.format in _ARCHIVES for s in structures.values())
    times = {e.key: e.mtime_ns for e in checkpoint.entries if e.mtime_ns is not None}
    last = times.get(layout.last_written(checkpoint.path)) if len(times) == len(checkpoint.entries) else None
    return None, layout.last_is_the_end and last is not None and last >= max(times.values())


def scan_checkpoint(
    storage: Storage, checkpoint: Checkpoint, options: ScanOptions, work: Work = PLAIN, settings: Settings | None = None
) -> Scan:
    """Scan all regular files of a checkpoint. It also raises the scanner's errors. With `settings`, plugins may read
    local files that no format of ours explains.

    Raises:
        ChangedWhileReadError: it opened other files than the listed ones, because their verdict would be wrong.
        DeniedError: a file with tensors has a name that cannot be read, or a folder cannot be listed.
    """
    for entry in checkpoint.irregular:
        if entry.kind == "unread":
            raise DeniedError(entry.target or "", key=entry.key)
        if entry.kind == "unnamed" and tensor_suffix(entry.key):
            raise DeniedError(f"{entry.key} cannot be read: {UNNAMED}", key=entry.key)
    if settings is not None and not all(key.endswith(_OURS) for key in checkpoint.files):
        options = read_by_plugins(storage, {key: key for key in checkpoint.files}, options, settings, work)
    scan = work.scanner(storage, checkpoint.files, options, work.progress)
    for listed, found in zip(checkpoint.entries, scan.files, strict=True):
        if not is_same_file(listed, found.entry, local=storage.root is not None):
            raise ChangedWhileReadError(f"{escape(listed.key)} was replaced while it was read", key=listed.key)
    return scan


def read_by_plugins(
    storage: Storage, names: Mapping[str, str], options: ScanOptions, settings: Settings, work: Work
) -> ScanOptions:
    """Return the options of a scan of these files, with what plugins say of those that no format of ours explains.
    `names` are the names that they were saved under, by key."""
    known = suffixes_of("tensors", "arrays", "objects", "pieces")
    odd = {key: name for key, name in names.items() if not name.lower().endswith(known) and may_hold_state(name)}
    if settings.no_plugins or storage.root is None or not odd:
        return options
    from ckptguard.plugins.formats import structures_by_plugins  # looks at what is installed, which takes a while

    found = structures_by_plugins(storage, odd, settings, work.is_stopped)
    return msgspec.structs.replace(options, structures=found)


def copy_differs(storage: Storage, prefix: str, manifest: Manifest, *, scanner: Scanner) -> str | None:
    """Return what is wrong with the copy of a checkpoint below `prefix`; None if every byte is as sealed.

    Its errors say nothing about the bytes.
    """
    keys = [prefix + f.path for f in manifest.files]
    try:
        scan = scanner(storage, keys, ScanOptions(md5=False), None)
    except ObjectMissingError as error:
        return f"{error.key.removeprefix(prefix)} is missing"
    for sealed, found in zip(manifest.files, scan.files, strict=True):
        if not same_content(sealed, found):
            return f"{sealed.path} differs from the sealed file"
    return None


def roles_of(files: Sequence[ScannedFile]) -> dict[str, tuple[str, ...]]:
    """Return the role of every tensor, by file. If none is that of state, matrices of floats are weights."""
    roles = {
        f.entry.key: tuple(
            assign_roles(
                f.entry.key,
                f.structure.tensors,
                containers=f.structure.containers,
                members=f.structure.members,
            )
        )
        for f in files
    }
    if any(role in STATE_ROLES for given in roles.values() for role in given):
        return roles
    for f in files:
        if file_role(f.entry.key) in ("", "model"):
            pairs = zip(f.structure.tensors, roles[f.entry.key], strict=True)
            roles[f.entry.key] = tuple("model" if is_float_matrix(t) else role for t, role in pairs)
    return roles


def gaps_of(checkpoint: Checkpoint, scan: Scan, thinned: Sequence[Seen] = ()) -> tuple[Gap, ...]:
    """Return what the layout implies and the scan did not find. What was taken from a thinned checkpoint is no gap."""
    structures = {f.entry.key: f.structure for f in scan.files}
    if thinned:
        sizes = {path: size for path, size, *_ in thinned}
        described = {
            p.rpartition("/")[0] for p in sizes if p in checkpoint.files and is_dcp_metadata(p)
        }  # anew, without
        gone = (p for p in sizes if p not in checkpoint.files and p.rpartition("/")[0] not in described)
        taken = (Entry(key=path, kind="file", size=sizes[path]) for path in gone)
        entries = sorted((*checkpoint.entries, *taken), key=lambda entry: entry.key)
        checkpoint = msgspec.structs.replace(checkpoint, entries=tuple(entries))
    missing = [Gap("not there", file) for file in checkpoint.missing]
    return (*missing, *LAYOUTS[checkpoint.layout].gaps(checkpoint, structures))


def misplaced_digests(storage: Storage, sealed: Manifest | None, scan: Scan) -> dict[str, tuple[str | None, ...]]:
    """Return digests of the sealed spans' places, for files whose structure no longer has these spans.

    This second, partial read names the damaged tensors. It is made only for files that are known to differ.
    """
    found = {f.entry.key: f.structure.spans for f in scan.files}
    placed = {}
    for file in sealed.files if sealed else ():
        places = [(s.offset, s.length) for s in file.spans]
        if places and file.path in found and places != [(s.offset, s.length) for s in found[file.path]]:
            placed[file.path] = digest_places(storage, file.path, places)
    return placed


def collect_evidence(
    storage: Storage, checkpoint: Checkpoint, scan: Scan, known: KnownFacts = NOTHING_KNOWN
) -> Evidence:
    """Gather everything that the checks need, once."""
    return Evidence(
        **msgspec.structs.asdict(known),
        checkpoint=checkpoint,
        scan=scan,
        roles=roles_of(scan.files),
        gaps=gaps_of(checkpoint, scan, known.thinned),
        placed_digests=misplaced_digests(storage, known.sealed, scan),
    )


def manifest_files(evidence: Evidence) -> tuple[File, ...]:
    """Return the files of a manifest, as they were scanned."""
    return tuple(manifest_file(f, evidence.roles[f.entry.key]) for f in evidence.scan.files)


def manifest_without_seal(
    checkpoint: Checkpoint, files: tuple[File, ...] = (), counters: tuple[Counter, ...] = (), *, generation: int = 1
) -> Manifest:
    """Describe a checkpoint that has no records. Nothing writes this manifest."""
    return Manifest(
        format=MANIFEST.writes,
        series=checkpoint.series,
        path=checkpoint.path,
        layout=checkpoint.layout,
        step=checkpoint.step,
        generation=generation,
        digest_origin="observer",
        sealed_at="",
        version="",
        nonce="",
        files=files,
        counters=counters,
    )


def manifest_file(file: ScannedFile, roles: tuple[str, ...]) -> File:
    """Return a file of a manifest, with the roles of its tensors."""
    places = zip(file.structure.spans, file.span_digests, strict=True)
    tensors = zip(file.structure.tensors, roles, file.numbers, strict=True)
    held = {t.name for t in file.structure.tensors} if file.structure.metadata else set()
    return File(
        path=file.entry.key,
        size=file.entry.size,
        format=file.structure.format,
        envelope=file.envelope,
        md5=file.md5,
        mtime_ns=file.entry.mtime_ns,
        inode=file.entry.inode,
        etag=file.entry.etag,
        ctime_ns=file.entry.ctime_ns,
        spans=tuple(Span(place.offset, place.length, digest) for place, digest in places),
        tensors=tuple(
            Tensor(t.name, t.dtype, t.shape, t.span, role, *(n.recorded if n else ())) for t, role, n in tensors
        ),
        globals=file.structure.globals,
        # Names that a safetensors header gives to tensors that the file holds under another name.
        aliases=tuple(sorted(alias for alias, name in file.structure.metadata.items() if name in held)),
        checksums=file.structure.checksums,
        pieces=file.pieces,
    )
