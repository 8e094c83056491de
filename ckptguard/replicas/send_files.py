"""Send the files of one checkpoint to another run. Every byte is compared on the way, and read back from there."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from ckptguard.errors import (
    ChangedWhileReadError,
    CouldNotTellError,
    ObjectExistsError,
    ObjectMissingError,
    StoppedError,
)
from ckptguard.keep.quarantine import damaged_folder
from ckptguard.runs.find_known_good import Candidate
from ckptguard.runs.history import History
from ckptguard.runs.run_view import RunView
from ckptguard.runs.work import Work
from ckptguard.scan.paced_reader import Pace, read_through
from ckptguard.scan.reread import read_back
from ckptguard.storage import Storage
from ckptguard.storage.remote.upload import SMALLEST_PART
from ckptguard.values.ids import CheckpointId
from ckptguard.values.manifest import File
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome
from ckptguard.verify.checkpoint import Verification, verify_checkpoint

_FILES_AT_ONCE = 3
_TRIES = 2  # a source that reads whole after all; a store that kept something else than was sent


@dataclass
class Sending:
    """One checkpoint on its way to `storage`, where its files lie below `prefix`. `places` are where whole copies of it
    are, best first; `sent` counts bytes that went over."""

    source: RunView
    target: RunView
    candidate: Candidate
    work: Work
    pace: Pace
    storage: Storage
    prefix: str
    places: list[tuple[Storage, str]]
    sent: int = 0
    claimed: dict[str, CheckpointId] | None = None  # the target's files that other checkpoints are made of
    lock: threading.Lock = field(default_factory=threading.Lock)  # for all above that changes, and for the views


def pace_of(work: Work, settings: Settings, hold: Callable[[], None] | None = None) -> Pace:
    """One pace for all files that are on their way together, in both directions: the work's rate, else that of the
    settings. StoppedError once the work is stopped. `hold` waits while something more urgent goes on."""

    def hold_on() -> None:
        if work.is_stopped():
            raise StoppedError("it was called off", key="")
        if hold is not None:
            hold()

    return Pace(settings.replica_rate if work.rate is None else work.rate, hold_on, work.progress)


def send_files(sending: Sending) -> str | None:
    """Have every file there, read back. Returns what is wrong with the source, if it is damaged.

    What of it is found damaged in the source gets its verdict there. CouldNotTellError if a file could not be sent.
    """
    files = sorted(sending.candidate.manifest.files, key=lambda f: -f.size)
    with ThreadPoolExecutor(min(_FILES_AT_ONCE, len(files) or 1), thread_name_prefix="ckptguard-send") as threads:
        tasks = [threads.submit(_have_file, sending, file) for file in files]
        try:
            wait(tasks, return_when=FIRST_EXCEPTION)
        finally:
            for one in tasks:
                one.cancel()
    failed = [error for one in tasks if not one.cancelled() and (error := one.exception()) is not None]
    if failed:
        raise failed[0]
    return next((wrong for one in tasks if (wrong := one.result()) is not None), None)


def _have_file(sending: Sending, file: File) -> str | None:
    """One file: what is there already counts if it is whole; what is not as it was sent goes, and is sent anew."""
    key = sending.prefix + file.path
    wrong = _wrong_there(sending, key, file)
    for _ in range(_TRIES):
        if wrong is None:
            return None
        if wrong:
            _move_aside(sending, key, file)
        damaged = _send_from_any_place(sending, key, file)
        if damaged is not None:
            return damaged
        wrong = _wrong_there(sending, key, file)
    if wrong is None:
        return None
    if wrong:
        sending.storage.remove(key)
    url = sending.target.run.url
    raise CouldNotTellError(f"{url} does not hold what was sent: {wrong or file.path + ' is not there'}")


def _wrong_there(sending: Sending, key: str, file: File) -> str | None:
    """None: the file is there and whole; an empty text: it is not there."""
    try:
        wrong = read_back(sending.storage, key, file, sending.pace)
    except ObjectMissingError:
        return ""
    return None if wrong is None else f"{file.path}: {wrong.message}"


def _move_aside(sending: Sending, key: str, file: File) -> None:
    """What lies in the way is damaged, or somebody's: it is kept, but not in place."""
    if sending.prefix:
        sending.storage.remove(key)
        return
    _refuse_claimed(sending, file.path)
    storage, run_prefix, records_prefix = sending.target.run.shared()
    folder = damaged_folder(sending.candidate.id)
    with contextlib.suppress(ObjectMissingError):
        storage.move(run_prefix + key, f"{records_prefix}{folder}/{key}")


def _refuse_claimed(sending: Sending, path: str) -> None:
    """Nothing that another checkpoint of the target is made of is touched. Its records are read again for that, once
    for all files of this checkpoint."""
    target = sending.target
    with sending.lock:
        if sending.claimed is None:
            target.refresh()
            sending.claimed = _claimed(target.history, sending.candidate.id)
        owner = sending.claimed.get(path)
    if owner is not None:
        raise CouldNotTellError(
            f"{path} in {target.run.url} belongs to {owner} of {owner.series}, and differs",
            hint=f"ckptguard verify {target.run.url}",
        )


def _claimed(history: History, but: CheckpointId) -> dict[str, CheckpointId]:
    """Each file of a run's checkpoints, without those of one and of what was moved aside."""
    claimed: dict[str, CheckpointId] = {}
    for series in history.names:
        for id in history.standings(series):
            manifest = None if id == but or history.is_quarantined(id) else history.manifest(id)
            claimed.update((file.path, id) for file in (manifest.files if manifest is not None else ()))
    return claimed


def _send_from_any_place(sending: Sending, key: str, file: File) -> str | None:
    """What is wrong with every copy of the source, if none is whole; None when it was sent."""
    wrong = f"no copy of {file.path} is there any more"
    for storage, prefix in list(sending.places):
        for _ in range(_TRIES):
            try:
                found = send_file(storage, prefix + file.path, sending.storage, key, file, sending.pace)
            except (ObjectMissingError, ChangedWhileReadError) as error:
                wrong = error.message
                break
            except ObjectExistsError:
                return None  # another process sends the same; what is there is read back like our own
            if found is None:
                with sending.lock:
                    sending.sent += file.size
                return None
            wrong = found
            if _is_damaged(sending, storage, prefix):
                break
    if sending.places:
        raise CouldNotTellError(f"{sending.candidate.answer.path} could not be read: {wrong}")
    return wrong


def send_file(source: Storage, source_key: str, target: Storage, target_key: str, file: File, pace: Pace) -> str | None:
    """Put a copy of a sealed file under a free key. Returns what is wrong with the source's bytes, and then nothing was
    put there; None if they are what was sealed. ObjectExistsError if the key is taken; ChangedWhileReadError."""
    from ckptguard.scan.sealed_stream import SealedStream

    stream = SealedStream(file)
    with source.open(source_key) as reader:
        if reader.entry.size != file.size:
            return f"{file.path} has {reader.entry.size} bytes instead of {file.size}"
        with target.upload(target_key) as upload:

            def send(block: bytes) -> None:
                stream.add(block)
                upload.write(block)

            read_through(reader, send, pace, block=SMALLEST_PART, remote=source.root is None)
            reader.check_unchanged()
            wrong = stream.wrong()
            if wrong is None:
                upload.commit()
    return wrong


def _is_damaged(sending: Sending, storage: Storage, prefix: str) -> bool:
    """Read a whole copy of the source anew: is it not as it was sealed? What lies in place gets its verdict."""
    manifest = sending.candidate.manifest
    with sending.lock:
        if (storage, prefix) not in sending.places:
            return True
        if prefix:
            damaged = any(read_back(storage, prefix + file.path, file, sending.pace) for file in manifest.files)
        else:
            checkpoint = sending.source.look_again(manifest.path)
            if checkpoint is None:
                return False
            alone = Work(scanner=sending.work.scanner)
            checked = verify_checkpoint(sending.source, checkpoint, Verification(md5=False), work=alone)
            if checked.id != sending.candidate.id:
                raise CouldNotTellError(f"{manifest.path} was saved anew meanwhile")
            damaged = checked.outcome is not Outcome.GOOD
        if damaged:
            sending.places.remove((storage, prefix))
        return damaged
