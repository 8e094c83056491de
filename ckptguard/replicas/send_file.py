"""Send one file to another storage. Every byte is held against the manifest on its way there."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ckptguard.errors import StoppedError
from ckptguard.scan import Progress
from ckptguard.scan.paced_reader import Pace, read_through
from ckptguard.storage import Storage
from ckptguard.storage.remote.upload import SMALLEST_PART
from ckptguard.values.manifest import File


def pace_of(
    rate: float | None,
    stop: threading.Event | None,
    progress: Progress | None = None,
    hold: Callable[[], None] | None = None,
) -> Pace:
    """One pace for all files that are on their way together, in both directions; StoppedError once `stop` is set.
    `hold` waits while something more urgent goes on."""

    def hold_on() -> None:
        if stop is not None and stop.is_set():
            raise StoppedError("it was called off", key="")
        if hold is not None:
            hold()

    return Pace(rate, hold_on, progress)


def send_file(
    source: Storage,
    source_key: str,
    target: Storage,
    target_key: str,
    file: File,
    pace: Pace,
) -> str | None:
    """Put a copy of a sealed file under a free key. What is wrong with the source's bytes, and then nothing was put
    there; None if they are what was sealed. ObjectExistsError if the key is taken; ChangedWhileReadError."""
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
