"""Runs `audited.py` over a group of cases and holds every answer against what must be true of all of them."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import struct
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from support.forked import Forked

import ckptguard

HERE = Path(__file__).resolve().parent
TIMEOUT = 100  # for a group; what bounds a case is its CPU time


class Case(NamedTuple):
    """One hostile target: what it is called, where it lies, and which exit codes are right."""

    name: str
    target: Path
    codes: tuple[int, ...] = (3,)
    expected: str | None = None  # a text that the answer must hold
    checks: frozenset[str] = frozenset()  # one of these must have found an error
    arguments: tuple[str, ...] = ()
    command: str = "verify"
    writes: tuple[str, ...] = ()  # folders in which records may be written
    reads: tuple[str, ...] = ()  # folders beside the target that may be read


class Answer(msgspec.Struct):
    """What became of one case."""

    name: str
    code: int
    out: str
    err: str
    seen: list[str]
    peak_kib: int
    cpu: float

    @property
    def document(self) -> Any:
        """The JSON on stdout."""
        return json.loads(self.out)


def check_cases(cases: Iterable[Case], *, benign: Path) -> dict[str, Answer]:
    """Run all; assert what holds for any input: the right exit code, one JSON document, no traceback, nothing run,
    opened or changed, in 10 s of CPU and 1 GiB. `benign` is a file that is looked at first."""
    cases = list(cases)
    before = {case.target: fingerprint(case.target) for case in cases}
    answers = run_audited(cases, benign)
    missing = [case.name for case in cases if case.name not in answers]
    assert not missing, f"no answer for {missing[0]!r}: it took more than its time or its memory, or died"
    wrong = {}
    for case in cases:
        trouble = _trouble(case, answers[case.name])
        if not case.writes and fingerprint(case.target) != before[case.target]:
            trouble.append("the target was changed")
        if trouble:
            wrong[case.name] = trouble
    assert not wrong, "\n".join(f"{name}: {what}" for name, trouble in wrong.items() for what in trouble)[:20_000]
    return answers


def run_audited(cases: list[Case], benign: Path) -> dict[str, Answer]:
    """The answers by name; a case that killed the process has none, and neither have those after it."""
    jobs = [
        {
            "name": case.name,
            "arguments": [case.command, str(case.target), *_options(case)],
            "allowed": [os.path.realpath(case.target.parent), *case.reads],
            "writable": list(case.writes),
        }
        for case in cases
    ]
    sick = benign.parent / "sick-run"  # a bad save opens an incident, and that takes more of our modules
    sick.mkdir(exist_ok=True)
    (sick / f"net-1{benign.suffix}").write_bytes(benign.read_bytes()[:-9])
    looked_at = [["verify", str(place), "--json", "--wait", "0"] for place in (benign, sick)]
    warm = [*looked_at, ["verify", f"{benign}.absent"], ["verify", "--help"]]
    answers = benign.parent / "answers.jsonl"
    environment = {name: text for name, text in os.environ.items() if not name.startswith(("CKPTGUARD_", "COV"))}
    settled = {"CKPTGUARD_SETTLE": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    audited = HERE / "audited.py"
    process = Forked(
        audited.read_text(encoding="utf-8"),
        answers,
        name=str(audited),
        environment=environment | settled,
        cwd=benign.parent,
        imported=("ckptguard.cli", "numpy"),
        piped=True,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps({"installed": _installed(), "warm": warm, "jobs": jobs}).encode())
    process.stdin.close()
    _, trouble = process.communicate(TIMEOUT)
    assert "Traceback" not in trouble, trouble
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    return {line["name"]: msgspec.convert(line, Answer) for line in lines if "code" in line}


def _options(case: Case) -> list[str]:
    return ["--json", *(("--wait", "0") if case.command == "verify" else ()), *case.arguments]


def _installed() -> list[str]:
    places = {sys.prefix, sys.base_prefix, *map(str, sysconfig.get_paths().values()), str(Path(ckptguard.__path__[0]))}
    return [
        *sorted(places),
        "/proc/self",
        "/proc/cpuinfo",
        "/proc/meminfo",
        "/sys/devices/system/cpu",
        "/sys/fs/cgroup",
    ]


def _trouble(case: Case, answer: Answer) -> list[str]:
    trouble = [f"saw: {seen}" for seen in answer.seen]
    if answer.code not in case.codes:
        trouble.append(f"exit code {answer.code}, not {case.codes}: {answer.out[-1500:]} {answer.err[-500:]}")
    text = answer.out + answer.err
    trouble += [f"it says {word}" for word in ("Traceback", "unexpected", "mistake in ckptguard") if word in text]
    trouble += [f"it prints {c!r} as it is" for c in sorted(set(text)) if c != "\n" and not c.isprintable()]
    if answer.code in (0, 3, 4) or answer.out:
        try:
            document = answer.document
        except ValueError:
            trouble.append(f"no JSON: {answer.out[:200]!r}")
        else:
            if list(document)[:2] != ["schema", "command"]:
                trouble.append("the JSON is no document of ours")
            elif case.checks and not case.checks & errors_of(document):
                trouble.append(f"no error of {sorted(case.checks)}: {answer.out[-1500:]}")
    if case.expected is not None and json.dumps(case.expected)[1:-1] not in text:
        trouble.append(f"it does not name {case.expected!r}: {answer.out[-1500:]}")
    return trouble


def errors_of(document: dict[str, Any]) -> set[str]:
    """The checks that found errors."""
    findings = (f for checkpoint in document.get("checkpoints", ()) for f in checkpoint["findings"])
    return {f["check"] for f in findings if f["severity"] == "error"}


def fingerprint(path: Path) -> str:
    """Names, kinds, sizes, modes and times below a path, and the bytes of its small files."""
    digest = hashlib.sha256()
    waiting = [path]
    while waiting:
        here = waiting.pop()
        try:
            info = here.lstat()
        except OSError as error:
            digest.update(repr(error.errno).encode())
            continue
        what = (os.fsencode(here), info.st_mode, info.st_size, info.st_mtime_ns, info.st_ino)
        digest.update(repr(what).encode())
        if here.is_dir() and not here.is_symlink():
            waiting += sorted(here.iterdir(), reverse=True)
        elif here.is_file() and not here.is_symlink() and info.st_size < 1 << 16:
            digest.update(here.read_bytes() if os.access(here, os.R_OK) else b"")
    return digest.hexdigest()


class Inotify:
    """Sees every open, read and change of what lies directly in some folders, whoever does it. Linux only."""

    ALL = 0x00000FFF
    _IGNORED = 0x40000000

    def __init__(self, *folders: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        assert self._descriptor >= 0
        for folder in folders:
            assert self._libc.inotify_add_watch(self._descriptor, os.fsencode(folder), self.ALL) >= 0

    def events(self) -> list[tuple[int, str]]:
        """What happened since the last call: (bits, name)."""
        found = []
        while True:
            try:
                raw = os.read(self._descriptor, 1 << 16)
            except BlockingIOError:
                return found
            while raw:
                _, bits, _, length = struct.unpack_from("iIII", raw)
                found.append((bits & ~self._IGNORED, raw[16 : 16 + length].rstrip(b"\0").decode()))
                raw = raw[16 + length :]

    def close(self) -> None:
        """Stop watching."""
        os.close(self._descriptor)
