"""What the repairs of places and of kept copies have in common."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from ckptguard.errors import BusyError
from ckptguard.records.incidents import list_incidents, update_incident
from ckptguard.records.run import Run
from ckptguard.records.scrubs import Where
from ckptguard.repair.replace_files import (
    CopySource,
    Damaged,
    aside_folder,
    exchange,
    seen_now,
    stage,
    staging,
    whole_source,
)
from ckptguard.replicas.find_replicas import open_replicas
from ckptguard.runs.results import Checked
from ckptguard.runs.run_view import RunView
from ckptguard.runs.work import Work
from ckptguard.storage.redaction import plain_url
from ckptguard.values.ids import CheckpointId
from ckptguard.values.manifest import Manifest

CHECK = "repair"
NO_COPY = "there is no other copy"


class RepairedFile(msgspec.Struct, frozen=True, kw_only=True):
    """One damaged file, in place or in the kept copy. `source` is where its bytes came from, or would come from in a
    dry run; `reason` why it could not be repaired."""

    path: str
    id: CheckpointId
    place: str
    file: str
    repaired: bool
    source: str | None
    reason: str = ""


class ToRepair(msgspec.Struct, frozen=True, kw_only=True):
    """One place of one checkpoint that is to be put right: under its own name, or its kept copy."""

    manifest: Manifest
    place: str

    @property
    def id(self) -> CheckpointId:
        """Which checkpoint it is."""
        return self.manifest.id

    @property
    def where(self) -> Where:
        """The same without its files."""
        return self.id, self.place


@dataclass
class Repair:
    """One repair: what it may do, and what it did so far. `hopeless`: what is not tried again, and until when.
    `staged`: what a killed one had staged already."""

    view: RunView
    work: Work
    dry_run: bool
    hopeless: dict[Where, float] = field(default_factory=dict)
    staged: list[CopySource] = field(default_factory=list)
    opened: list[CopySource] | None = None
    files: list[RepairedFile] = field(default_factory=list)
    checked: list[Checked] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)

    @property
    def run(self) -> Run:
        """The run that is repaired."""
        return self.view.run

    def replicas(self) -> list[CopySource]:
        """The replicas as sources, the farthest ones; opened when nothing else helps."""
        if self.opened is None:
            self.opened = [
                CopySource(name=f"replica {plain_url(replica.url)}", storage=replica.storage, prefix="", near=False)
                for replica in (view.run for view in open_replicas(self.view))
            ]
        return self.opened

    @property
    def how(self) -> str:
        """Where copies are to have bytes of their own, a repaired file has them, too."""
        return "copy" if self.view.settings.keep == "copy" else "clone"

    def note(self, target: ToRepair, damaged: Damaged, source: str | None, *, reason: str = "") -> None:
        """Note what became of one file: it was repaired from `source`, or would be in a dry run, unless there is a
        `reason` why not."""
        self.files.append(
            RepairedFile(
                path=target.manifest.path,
                id=target.id,
                place=target.place,
                file=damaged.file.path,
                repaired=source is not None and not self.dry_run,
                source=source,
                reason=reason,
            )
        )


def put_right(
    repair: Repair, target: ToRepair, damaged: list[Damaged], sources: list[CopySource], *, none: str = NO_COPY
) -> list[tuple[Damaged, str]]:
    """Stage what has a source, all of it before anything is moved, and exchange it; returns what was put right, and
    from where. In a dry run it is only looked for. `none`: why there may be no source at all beside replicas."""
    run, done = repair.run, []
    if not damaged:
        return []
    ready: list[tuple[Damaged, str]] = []
    with staging(run, damaged[0].storage) as staged:
        for one in damaged:
            source, why = whole_source(one, sources)
            if source is None:
                source, more = whole_source(one, repair.replicas())
                why = "; ".join(reason for reason in (why or none, more) if reason)
            if source is not None:
                why = "" if repair.dry_run else stage(run, one, source, staged.prefix, how=repair.how) or ""
            if source is None or why:
                repair.note(target, one, None, reason=why)
            elif repair.dry_run:
                repair.note(target, one, source.name)
            else:
                ready.append((one, source.name))
        aside = aside_folder(target.id)
        for one, name in ready:
            staged.needed = True
            try:
                exchange(run, one, staged.prefix, aside)
            except BusyError:
                staged.needed = seen_now(one.storage, one.key) is None
                raise
            staged.needed = False
            done.append((one, name))
            repair.note(target, one, name)
    return done


def close_incidents(run: Run, about: dict[str, str], done: list[tuple[Damaged, str]]) -> None:
    """Close the incidents about damage with this evidence: it was repaired."""
    names = ", ".join(sorted({source for _, source in done}))
    for incident in list_incidents(run):
        if incident.state != "closed" and incident.cause == "damage" and about.items() <= incident.evidence.items():
            update_incident(run, incident, state="closed", action=f"put the right bytes back from the {names}")
