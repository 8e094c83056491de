"""Mirror records: what a training needs besides its checkpoints, so that a replica is enough to go on with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckptguard.errors import CouldNotTellError, ObjectExistsError, ObjectMissingError, RecordsError
from ckptguard.records.ledger import FOLDER as LEDGER
from ckptguard.records.ledger import append_verdict
from ckptguard.records.lineage import KEY as LINEAGE
from ckptguard.records.lineage import another_run, begin_lineage, join_lineage, read_lineage
from ckptguard.records.manifests import FOLDER as MANIFESTS
from ckptguard.records.manifests import manifest_key
from ckptguard.records.quarantine import quarantined_generations
from ckptguard.records.run import FORMAT_KEY as FORMAT
from ckptguard.records.run import Run, create_record, list_records, read_record
from ckptguard.replicas.send_checkpoint import verdict_on_content
from ckptguard.runs.history import Key, load_history
from ckptguard.runs.listing import list_checkpoints
from ckptguard.runs.sealed_content import sealed_outcome
from ckptguard.storage import open_storage
from ckptguard.values.ids import RECORDS_FOLDER, series_folder
from ckptguard.values.manifest import Manifest
from ckptguard.values.record_text import decode_record
from ckptguard.values.storage_options import StorageOptions
from ckptguard.values.verdict import Outcome

_DECISIONS = ("settings", "reference", "incidents")  # what was allowed, accepted, and found out, batches to leave out
_BESIDE = "training"


def join(source: Run, target: Run) -> None:
    """Have the target be of the source's lineage. CouldNotTellError if it is of another one, or holds checkpoints that
    nobody replicated."""
    lineage, other = begin_lineage(source), read_lineage(target)
    if other is None and _is_empty(target):
        join_lineage(target, lineage)
        _read_back(source, target)
    other = read_lineage(target)  # of several that begin at once one came first
    if other is None or other.token != lineage.token:
        raise another_run(target, other)


def clear_broken_beginning(url: str, options: StorageOptions) -> None:
    """Remove the first records of a replica where a store has kept them as something else, and nothing came after."""
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
            storage.remove(key)


def _read_back(source: Run, target: Run) -> None:
    """What a store has kept of the first records as something else would keep everybody out of the target."""
    for key in (FORMAT, LINEAGE):
        if read_record(target, key) != read_record(source, key):
            target.records.remove(key)
            raise CouldNotTellError(f"{target.url} does not hold the {key} that was written to it")


def _is_empty(run: Run) -> bool:
    """Whether there is neither a checkpoint in place nor one on record."""
    if list_records(run, LEDGER, recursive=True) or list_records(run, MANIFESTS, recursive=True):
        return False
    try:
        return not list_checkpoints(run)
    except ObjectMissingError:
        return True  # not even the folder


def mirror_decisions(source: Run, target: Run) -> None:
    """What was decided and found out in the source, and is not known in the target. Records never change: what is
    there already is the same."""
    for folder in _DECISIONS:
        known = set(list_records(target, folder, recursive=True))
        wanted = (name for name in list_records(source, folder, recursive=True) if name.endswith(".json"))
        copy_records(source, target, (f"{folder}/{name}" for name in wanted if name not in known))


def mirror_beside(source: Run, target: Run, manifest: Manifest) -> None:
    """What training recorded beside a checkpoint: it must be there before the checkpoint counts."""
    start = f"{series_folder(manifest.path)}.{manifest.generation}."
    names = [name for name in list_records(source, _BESIDE) if name.startswith(start)]
    copy_records(source, target, (f"{_BESIDE}/{name}" for name in names))


def mirror_history(source: Run, target: Run, without: Sequence[Manifest]) -> None:
    """Manifests and verdicts of all generations but these, and those that the target has set aside, of which it has its
    own opinion: so no number is ever given twice."""
    keys = [manifest_key(m.series, m.step, m.generation) for m in without]
    keys += [manifest_key(series, *key) for series, aside in quarantined_generations(target).items() for key in aside]
    judged = [manifest_key(series, *key) for series, key in _judged_itself(source, target)]
    for folder, not_these in ((MANIFESTS, keys), (LEDGER, [*keys, *judged])):
        starts = tuple(key.removeprefix(f"{MANIFESTS}/").removesuffix("json") for key in not_these)
        known = set(list_records(target, folder, recursive=True))
        names = (name for name in list_records(source, folder, recursive=True) if not name.startswith(starts))
        copy_records(source, target, (f"{folder}/{name}" for name in names if name not in known))


def _judged_itself(source: Run, target: Run) -> list[tuple[str, Key]]:
    """What the target has verdicts on: the source's speak of another place, and would come after its own. But that the
    content of what is good is not is news to it."""
    here, there = load_history(source), load_history(target)
    found = []
    for series in there.names:
        for key, standing in there.standings(series).items():
            verdict = here.verdict(series, key) if standing.outcome is Outcome.GOOD else None
            if verdict is None or sealed_outcome(verdict) in (Outcome.GOOD, None):
                found.append((series, key))
    return found


def mirror_verdicts(source: Run, target: Run) -> None:
    """Have the target know what became known of its checkpoints since they were sent: that training was sick, or that
    a user cleared it of that. What the target found out itself about its own place stands."""
    here, there = load_history(source), load_history(target)
    for series in there.names:
        for key, standing in there.standings(series).items():
            ours = here.standings(series).get(key)
            if ours is None or ours.outcome is standing.outcome:
                continue
            verdict, theirs = here.verdict(series, key), there.verdict(series, key)
            if verdict is None or theirs is None or theirs.place_damaged:
                continue
            content = sealed_outcome(verdict)
            lifted = theirs.outcome is Outcome.SUSPECT and content is Outcome.GOOD
            if content is not None and content is not theirs.outcome and (lifted or theirs.outcome is Outcome.GOOD):
                append_verdict(target, verdict_on_content(verdict))


def copy_records(source: Run, target: Run, keys: Iterable[str]) -> None:
    """Copy records as they are, unless they are there."""
    for key in keys:
        text = read_record(source, key)
        if not text:
            continue
        try:
            create_record(target, key, text)
        except ObjectExistsError:
            continue
