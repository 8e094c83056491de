"""The scanning process: ``python -m ckptguard.scan.process.worker MEMORY IDLE PARENT``.

It parses files that may be hostile, so it has no secrets, and limited memory and time. It has low priority, and dies
with its parent. It serves one request at a time, and ends after being idle for a while.
"""

from __future__ import annotations

import math
import os
import resource
import select
import sys

import msgspec

from ckptguard.errors import CouldNotTellError
from ckptguard.scan.files import scan_files
from ckptguard.scan.process.limits import die_with, limit_process
from ckptguard.scan.process.low_priority import lower_priority, lower_session, yield_to_all
from ckptguard.scan.process.messages import PREFIX, Answer, Request, frame
from ckptguard.scan.result import Scan
from ckptguard.storage import open_storage


def main() -> None:
    """Serve requests from stdin until it closes, or none comes for the idle time."""
    memory, idle, parent = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    answers = os.dup(1)
    os.dup2(2, 1)  # a library's prints must not mix with the answers
    die_with(parent)
    limit_process(memory)
    lower_session()
    lower_priority()
    while select.select([0], [], [], idle)[0]:
        body = _read_request()
        if body is None:
            return
        request = msgspec.msgpack.decode(body, type=Request)
        if request.yields:
            yield_to_all()
        _write(answers, _frame_of(_answer(request)))


def _answer(request: Request) -> Answer:
    used = resource.getrusage(resource.RUSAGE_SELF)
    budget = math.ceil(used.ru_utime + used.ru_stime + request.cpu_seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (budget, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    try:
        return Answer(scan=scan_files(open_storage(request.url), list(request.keys), request.options))
    except CouldNotTellError as error:
        return Answer(kind=error.kind, message=error.message, key=str(getattr(error, "key", "")))
    except MemoryError:
        return Answer(kind="worker", message="the scanning process ran out of memory")
    except Exception as error:
        return Answer(kind="worker", message=f"the scanning process failed: {type(error).__name__}: {error}")


def _frame_of(answer: Answer) -> bytes:
    try:
        return frame(answer)
    except OverflowError:
        assert answer.scan is not None
        return frame(Answer(scan=_without_huge_numbers(answer.scan)))
    except (UnicodeError, MemoryError, ValueError) as error:
        return frame(Answer(kind="worker", message=f"the scan cannot be sent: {type(error).__name__}"))


def _without_huge_numbers(scan: Scan) -> Scan:
    """Remove numbers beyond 64 bits, which a pickle can hold and MessagePack cannot. Checks need only small ones."""
    files = []
    for file in scan.files:
        leaves = tuple(leaf for leaf in file.structure.leaves if -(2**63) <= leaf.value < 2**63 or leaf.value % 1)
        files.append(msgspec.structs.replace(file, structure=msgspec.structs.replace(file.structure, leaves=leaves)))
    return msgspec.structs.replace(scan, files=tuple(files))


def _read_request() -> bytes | None:
    prefix = _read_exactly(PREFIX.size)
    return None if prefix is None else _read_exactly(PREFIX.unpack(prefix)[0])


def _read_exactly(length: int) -> bytes | None:
    data = b""
    while len(data) < length:
        block = os.read(0, length - len(data))
        if not block:
            return None
        data += block
    return data


def _write(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


if __name__ == "__main__":
    main()
