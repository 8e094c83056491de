"""What the benchmarks share: their options, their clocks, and large files that are quick to write."""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

from servers.moto_server import moto_server
from servers.radosgw import radosgw
from servers.s3 import S3Server
from support.daemon_process import DaemonProcess
from support.tiny_files import safetensors_head

from ckptguard.values.settings import Settings

BUCKET = "ckptguard-bench"


def options(description: str | None, **defaults: object) -> argparse.Namespace:
    """Parse the command line. Each option has the type of its default, and a list takes several values.

    A type stands for no default, and a tuple for the choices, of which the first is the default.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, tuple):
            parser.add_argument(flag, choices=[one for one in default if one is not None], default=default[0])
        elif isinstance(default, list):
            parser.add_argument(flag, nargs="*", type=type(default[0]), default=default)
        elif isinstance(default, type):
            parser.add_argument(flag, type=default)
        else:
            parser.add_argument(flag, type=type(default), default=default)
    return parser.parse_args()


def seconds(act: Callable[[], object]) -> float:
    """The seconds that a call takes."""
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def median_ms(times: int, act: Callable[[], object]) -> float:
    """The median of some calls, in milliseconds."""
    return statistics.median(seconds(act) for _ in range(times)) * 1e3


def median_ratio(some: Sequence[float], others: Sequence[float]) -> float:
    """The median of the ratios of two series that were measured in turns."""
    return statistics.median(a / b for a, b in zip(some, others, strict=True))


class Cost(NamedTuple):
    """What one process cost, its children included: seconds of the clock and of processors, and its peak memory."""

    wall: float
    cpu: float
    peak_mib: float


def cost_of(argv: Sequence[str], environment: Mapping[str, str], codes: Sequence[int] = (0,)) -> Cost:
    """Run a command to its end and say what it cost; it must end as expected."""
    started = time.perf_counter()
    process = subprocess.Popen(argv, env=environment, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in codes:
        raise SystemExit(f"{argv} ended with {process.returncode}")
    return Cost(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def resident_mib(pid: int | str = "self") -> float:
    """The resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def warm(paths: Iterable[Path]) -> None:
    """Have files in the page cache: a system may have dropped them since the last measurement."""
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 22):
                pass


def write_tensors(
    path: Path, shapes: Mapping[str, Sequence[int]], blocks: Iterable[bytes], *, dtype: str = "F32"
) -> None:
    """Write a safetensors file of these tensors, whose bytes come in blocks, to the disk and into the page cache."""
    with path.open("wb") as file:
        file.write(safetensors_head(shapes, dtype))
        for block in blocks:
            file.write(block)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def daemon(folder: Path, *runs: Path, arguments: tuple[str, ...] = (), **settings: object) -> Iterator[DaemonProcess]:
    """A daemon over some runs with default settings but for these, ended with the block."""
    usual = Settings()
    given = {"settle": usual.settle, "scan_interval": usual.scan_interval, **settings}
    environment = {f"CKPTGUARD_{name.upper()}": str(value) for name, value in given.items()}
    started = DaemonProcess(folder, *runs, arguments=arguments, **environment)
    try:
        yield started
    finally:
        started.stop()


def s3_server(kind: str, folder: Path, **how: int) -> AbstractContextManager[S3Server]:
    """An S3: moto's, which is quick to start, or Ceph's gateway."""
    return moto_server(folder, **how) if kind == "moto" else radosgw(folder)
