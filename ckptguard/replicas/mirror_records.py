"""Mirror what a training needs besides its checkpoints, so that a replica is enough to continue it."""

from __future__ import annotations

import contextlib
import itertools
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence

import msgspec

from ckptguard.decisions.known_good import parse_verdict_name, verdict_name
from ckptguard.errors import CouldNotTellError, ObjectExistsError, ObjectMissingError, RecordsError
from ckptguard.records.ledger import FOLDER as LEDGER
from ckptguard.records.lineage import KEY as LINEAGE
from ckptguard.records.lineage import another_run, begin_lineage, join_lineage, read_lineage
from ckptguard.records.manifests import FOLDER as MANIFESTS
from ckptguard.records.notified import INCIDENTS, mark_notified, verdict_key
from ckptguard.records.run import Run, as_line, create_record, list_records, read_record
from ckptguard.replicas.send_checkpoint import verdict_on_content
from ckptguard.runs.removal import remove_record, remove_wrong_copy
from ckptguard.runs.run_view import RunView
from ckptguard.runs.sealed_content import sealed_outcome
from ckptguard.storage import open_storage
from ckptguard.values.ids import RECORDS_FOLDER, CheckpointId, series_folder, series_from_folder
from ckptguard.values.manifest import Manifest
from ckptguard.values.record_formats import FORMAT_KEY as FORMAT
from ckptguard.values.record_formats import RECORDS
from ckptguard.values.record_text import decode_record
from ckptguard.values.storage_options import StorageOptions
from ckptguard.values.verdict import Outcome

_DECISIONS = ("settings", "reference", "incidents")  # permissions, accepted schemas, findings, and batches to skip
_BESIDE = "training"
_TIMELINE = 100  # contents of each series that are told; how often each is saved, and what is joined, follows from them


def join(source: Run, target: RunView) -> None:
    """Join the target to the source's lineage. Raises CouldNotTellError if it has another one or is not empty."""
    lineage, other = begin_lineage(source), read_lineage(target.run)
    if other is None and _is_empty(target):
        join_lineage(target.run, lineage)
        _read_back(source, target.run)
    other = read_lineage(target.run)  # of several that start at once one came first
    if other is None or other.token != lineage.token:
        raise another_run(target.run, other)


def clear_broken_beginning(url: str, options: StorageOptions) -> None:
    """Remove a replica's first records if a store has corrupted them, and nothing else was written."""
    storage = open_storage(f"{url}/{RECORDS_FOLDER}", must_exist=False, options=options)
    try:
        if any(entry.key.split("/")[0] in (MANIFESTS, LEDGER) for entry in storage.list("", recursive=True)):
            return
    except ObjectMissingError:
        return
    for key in (FORMAT, LINEAGE):
        try:
            with storage.open(key) as reader:
                text = reader.read(0, min(reader.entry.size, 1 << 16))
            decode_record(text, dict[str, object], key)["format"]
        except ObjectMissingError:
            continue
        except (RecordsError, KeyError):
            remove_wrong_copy(storage, key)


def _read_back(source: Run, target: Run) -> None:
    """Check that the store kept the first records as they are. Otherwise nobody could open the target."""
    formats = {as_line({"format": number}) for number in range(1, RECORDS.reads + 1)}  # it need not have the source's
    for key, texts in ((FORMAT, formats), (LINEAGE, {read_record(source, LINEAGE)})):
        if read_record(target, key) not in texts:
            remove_record(target, key)
            raise CouldNotTellError(f"{target.url} does not hold the {key} that was written to it")


def _is_empty(view: RunView) -> bool:
    """True if there is no checkpoint in place or on record."""
    if list_records(view.run, LEDGER, recursive=True) or list_records(view.run, MANIFESTS, recursive=True):
        return False
    try:
        return not view.checkpoints
    except ObjectMissingError:
        return True  # not even the folder exists


def mirror_decisions(source: Run, target: Run) -> None:
    """Copy what was decided and found in the source. Records never change, so existing ones are equal."""
    for folder in _DECISIONS:
        names = [name for name in list_records(source, folder, recursive=True) if name.endswith(".json")]
        known = set(list_records(target, folder, recursive=True))
        _copy_records(source, target, folder, (name for name in names if name not in known))


def records_beside(run: Run) -> list[str]:
    """Return the names of what training recorded beside its checkpoints, sorted."""
    return sorted(list_records(run, _BESIDE))


def mirror_beside(source: Run, target: Run, manifest: Manifest, names: Sequence[str]) -> None:
    """Copy what training recorded beside a checkpoint before that checkpoint counts. `names` are all such records."""
    start = f"{series_folder(manifest.path)}.{manifest.generation}."
    later = itertools.islice(names, bisect_left(names, start), None)
    own = itertools.takewhile(lambda name: name.startswith(start), later)
    _copy_records(source, target, _BESIDE, own)


def mirror_history(source: RunView, target: RunView, without: Collection[CheckpointId]) -> None:
    """Copy the manifests and verdicts of all generations except `without` and those that the target has quarantined.

    So no generation number is ever used twice. The target's records are read again when next needed.
    """
    aside = (id for ids in target.history.quarantined.values() for id in ids)
    left_out = {id.record_path for id in (*without, *aside)}
    judged = {id.record_path for id in _judged_itself(source, target)}
    for folder, not_these in ((MANIFESTS, left_out), (LEDGER, left_out | judged)):
        known = set(list_records(target.run, folder, recursive=True))
        listed = list_records(source.run, folder, recursive=True)
        names = [name for name in listed if name not in known and _record_path(name) not in not_these]
        if folder == LEDGER:
            _need_no_incident(target.run, names)
        _copy_records(source.run, target.run, folder, names)
    target.refresh()


def _need_no_incident(target: Run, names: Iterable[str]) -> None:
    """Note verdicts that are about to be copied. A daemon that guards this run sees them, but they are history."""
    for name in names:
        folder, _, entry = name.partition("/")
        current_verdict = parse_verdict_name(series_from_folder(folder), entry)
        if current_verdict is not None and current_verdict.outcome is Outcome.BAD:
            mark_notified(target, INCIDENTS, verdict_key(current_verdict))


def _record_path(name: str) -> str:
    """Return the generation of a record below its folder: ``<series>/<step>.<generation>``."""
    folder, _, rest = name.rpartition("/")
    return f"{folder}/{'.'.join(rest.split('.')[:2])}"


def _judged_itself(source: RunView, target: RunView) -> list[CheckpointId]:
    """Return what the target has verdicts on: the source's verdicts are about another place, and would follow its own.
    Only the news that good content is not good counts there, too."""
    here, there = source.history, target.history
    found = []
    for series in there.names:
        for id, current_verdict in there.current_verdicts(series).items():
            verdict = here.verdict(id) if current_verdict.outcome is Outcome.GOOD else None
            if verdict is None or sealed_outcome(verdict) in (Outcome.GOOD, None):
                found.append(id)
    return found


def mirror_verdicts(source: RunView, target: RunView) -> None:
    """Tell the target what became known about its checkpoints since they were sent: training was sick, or a user
    cleared them. The target's own findings about its files stay."""
    here, there = source.history, target.history
    for series in list(there.names):
        for id, current_verdict in list(there.current_verdicts(series).items()):
            ours = here.current_verdict(id)
            if ours is None or ours.outcome is current_verdict.outcome:
                continue
            verdict, theirs = here.verdict(id), there.verdict(id)
            if verdict is None or theirs is None or theirs.place_damaged:
                continue
            content = sealed_outcome(verdict)
            lifted = theirs.outcome is Outcome.SUSPECT and content is Outcome.GOOD
            if content is not None and content is not theirs.outcome and (lifted or theirs.outcome is Outcome.GOOD):
                theirs = msgspec.structs.replace(verdict_on_content(verdict), seen=theirs.seen)
                there.add_verdict(theirs)


def mirror_timeline(source: RunView, target: RunView, series: Iterable[str], held: Collection[CheckpointId]) -> None:
    """Tell the target of all contents of series that are saved together, except those that it is to hold.

    These are bad or gone, or what was saved with them is. Without them it would take what was saved with them for whole
    saves, or join contents of two saves. Of each series the newest are told.
    """
    here, there = source.history, target.history
    notified = False
    for name in sorted(series):
        current_verdicts = sorted(here.current_verdicts(name).items(), key=lambda one: one[0].order, reverse=True)
        for id, current_verdict in current_verdicts[:_TIMELINE]:
            known = there.is_sealed(id) or there.has_verdict(id) or not here.is_sealed(id) or here.is_quarantined(id)
            if known or id in held:
                continue
            entry = f"{series_folder(name)}/{verdict_name(current_verdict)}"
            _need_no_incident(target.run, [entry])
            _copy_records(source.run, target.run, MANIFESTS, [f"{id.record_path}.json"])
            _copy_records(source.run, target.run, LEDGER, [entry])
            notified = True
    if notified:
        target.refresh()


def _copy_records(source: Run, target: Run, folder: str, names: Iterable[str]) -> None:
    """Copy records as they are, unless they exist."""
    for name in names:
        text = read_record(source, f"{folder}/{name}")
        if text:
            with contextlib.suppress(ObjectExistsError):
                create_record(target, f"{folder}/{name}", text)
