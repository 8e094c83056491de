"""What a pass over a run gives to the catalogue: plain data that the pass has anyway."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from ckptguard.records.after_seal import MD5S as LATE_MD5S
from ckptguard.records.audit import FOLDER as AUDIT
from ckptguard.records.incidents import FOLDER as INCIDENTS
from ckptguard.records.pins import FOLDER as PINS
from ckptguard.records.samples import FOLDER as SAMPLES
from ckptguard.records.scrubs import FOLDER as SCRUBS
from ckptguard.records.silences import FOLDER as SILENCES
from ckptguard.records.trash import FOLDER as TRASH
from ckptguard.runs.history import FOLDERS
from ckptguard.storage.protocol import Entry
from ckptguard.values.run_rows import RunPlaces


class RunLook(RunPlaces, frozen=True, kw_only=True):
    """What a pass over a run has seen. `names` are the keys of all records. `logs` are the files in which the trainer
    logs its updates, the newest first. `paths` are those of all checkpoints that are there, escaped."""

    names: frozenset[str]
    logs: tuple[Entry, ...] = ()
    paths: frozenset[str] = frozenset()

    @property
    def curve(self) -> str:
        """What is equal only if the curves of two looks are; empty if there is none."""
        samples = sorted(below(SAMPLES, self.names))
        logs = [(log.key, log.signature) for log in self.logs]
        text = repr((samples, logs)).encode("utf-8", "backslashreplace")
        return hashlib.blake2b(text, digest_size=8).hexdigest() if samples or logs else ""


def digest_of(look: RunLook) -> bytes:
    """Return what is equal only if the rows of two looks are."""
    digest = hashlib.blake2b(digest_size=16)
    state = (
        look.url,
        sorted((id.record_path, place.bytes, place.written_at, place.unread) for id, place in look.places.items()),
        sorted((id.record_path, count) for id, count in look.replicated.items()),
        [(save.series, save.bytes, save.written_at, save.unfinished) for save in look.waiting],
        (
            look.replicas,
            look.behind,
            look.scrub_interval,
            look.keep,
            look.curve,
            look.not_understood,
            look.takes_md5,
            look.unread,
        ),
    )
    digest.update(repr(state).encode("utf-8", "backslashreplace"))
    for name in sorted(filter(counts, look.names)):
        digest.update(name.encode("utf-8", "surrogateescape") + b"\0")
    return digest.digest()


def counts(key: str) -> bool:
    """True if a record's name changes rows. The files of kept copies and of the trash do not."""
    top, _, rest = key.partition("/")
    depth = rest.count("/")
    return rest.endswith(".json") and (
        (top in (*FOLDERS, TRASH, LATE_MD5S) and depth == 1)
        or (top == SCRUBS and depth == 1)
        or (top, depth) in ((INCIDENTS, 0), (SAMPLES, 0), (AUDIT, 0), (SILENCES, 0), (PINS, 2))
    )


def below(folder: str, names: Iterable[str]) -> list[str]:
    return [name.removeprefix(f"{folder}/") for name in names if name.startswith(f"{folder}/") and counts(name)]
