"""Each call of the system that a program makes fails once, with each error that it can have: every command, the daemon
and a guarded training. There is no traceback, nothing is lost, no verdict is wrong, and the training is as it was.

CKPTGUARD_CAMPAIGN=full: a thousand failures of each program, drawn from all of them."""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.store_operations import Operation, Stage, build
from support.store_promises import arrived_wrong, violations
from support.tiny_run import clone, cycle
from support.views import look

from ckptguard.inspect.list_states import survey
from ckptguard.records.run import open_run
from ckptguard.values.verdict import Outcome

PATIENCE = 60.0  # seconds after which a program hangs
HANGS = -1000

# For each call the errors that its manual names and that do not say that something is not there. Not mmap: for a thread
# that finds no memory at its start Python itself waits for ever.
ERRORS = {
    **dict.fromkeys(("openat", "open"), ("EACCES", "EIO", "EMFILE", "ENFILE", "ENOMEM", "ESTALE", "EINTR")),
    **dict.fromkeys(("read", "pread64", "preadv", "preadv2"), ("EIO", "ESTALE", "EINTR")),
    **dict.fromkeys(("write", "pwrite64", "pwritev"), ("EIO", "ENOSPC", "EDQUOT", "EFBIG", "EINTR")),
    **dict.fromkeys(("fsync", "fdatasync"), ("EIO", "ENOSPC", "EINVAL", "EROFS")),
    **dict.fromkeys(("newfstatat", "fstat", "lstat", "stat", "statx"), ("EIO", "EACCES", "ENOMEM", "ESTALE")),
    **dict.fromkeys(("link", "linkat"), ("EPERM", "EMLINK", "EXDEV", "EIO", "ENOSPC", "EACCES")),
    **dict.fromkeys(("unlink", "unlinkat", "rmdir"), ("EIO", "EBUSY", "EACCES", "EROFS")),
    **dict.fromkeys(("rename", "renameat", "renameat2"), ("EIO", "ENOSPC", "EXDEV", "EACCES", "EINVAL", "ENOSYS")),
    **dict.fromkeys(("mkdir", "mkdirat"), ("EIO", "ENOSPC", "EACCES", "EMLINK", "EROFS")),
    **dict.fromkeys(("chmod", "fchmod", "fchmodat", "utimensat"), ("EPERM", "EIO", "EROFS")),
    **dict.fromkeys(("clone", "clone3", "fork", "vfork"), ("EAGAIN", "ENOMEM")),
    **dict.fromkeys(("pipe2", "dup", "dup2", "dup3", "socket", "epoll_create1"), ("EMFILE", "ENFILE")),
    **dict.fromkeys(("statfs", "fstatfs"), ("EIO", "ENOSYS", "ESTALE")),
    **dict.fromkeys(("readlink", "readlinkat"), ("EIO", "EACCES", "ENOMEM")),
    "getdents64": ("EIO", "ESTALE"),
    "flock": ("ENOLCK", "ENOSYS", "EOPNOTSUPP", "EIO", "EINTR"),
    "ioctl": ("ENOTTY", "EOPNOTSUPP", "EIO"),
    "ftruncate": ("EIO", "ENOSPC", "EINVAL"),
    "fadvise64": ("EINVAL", "EBADF"),
    "fcntl": ("EMFILE", "ENOLCK"),
    "getcwd": ("EACCES", "ENOMEM"),
    "inotify_init1": ("EMFILE",),
    "inotify_add_watch": ("ENOSPC", "EACCES"),
    "prlimit64": ("EPERM",),
    "setpriority": ("EPERM", "EACCES"),
    "ioprio_set": ("EPERM",),
    "bind": ("EACCES", "ENOSPC"),
    "listen": ("EADDRINUSE",),
    "getsockopt": ("ENOPROTOOPT",),
    "close": ("EIO",),
}

PROGRAMS = {
    "ckptguard": "ckptguard.cli.entry:commands",
    "ckptguard-daemon": "ckptguard_daemon.command:command",
    "train": "support.traced_training:PROGRAM",  # the only one that needs torch
}
_SERVER = """
import contextlib, faulthandler, importlib, json, os, select, sys, traceback
faulthandler.enable()
name, found, *sys.path[:0] = sys.argv[1:]
module, _, attribute = found.partition(":")
program = getattr(importlib.import_module(module), attribute)
import ckptguard_daemon.service, ckptguard.scan.numbers
telling, nothing = open(os.dup(1), "w"), os.open(os.devnull, os.O_RDWR)
os.dup2(nothing, 1)

def act(request):
    try:
        program.main(request["argv"], prog_name=name)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except BaseException:
        os.writev(2, [traceback.format_exc().encode()])
        return 99
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
    return 0

for line in sys.stdin:
    request = json.loads(line)
    os.environ.update(request["environ"])
    if not request["out"]:  # what a program imports when it runs
        print(act(request), file=telling, flush=True)
        continue
    (waiting, go), (ready, told) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        out = os.open(request["out"], os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        for number, target in enumerate((nothing, out, out)):
            os.dup2(target, number)
        os.close(go)
        os.write(told, b"1")  # what comes until here is not to be failed
        select.select([waiting], [], [])  # no call that may be failed
        os._exit(act(request))
    for end in (waiting, told):
        os.close(end)
    os.read(ready, 1)
    os.close(ready)
    print(pid, file=telling, flush=True)
    sys.stdin.readline()
    os.write(go, b"1")
    os.close(go)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=telling, flush=True)
"""


class Traced:
    """One of the `PROGRAMS`, and strace to fail its calls. One process loads the program, and forks for each
    request. The child waits until strace has it, so that a call's number counts what the program does, not how
    Python starts. `environ` is the program's. `done` says by what it printed that a program which does not end by
    itself has done enough: it is asked to end then."""

    def __init__(
        self, program: str, folder: Path, environ: dict[str, str], done: Callable[[str], bool] | None = None
    ) -> None:
        self._folder, self._environ, self._done = folder, environ, done
        paths = [str(Path(__file__).parents[1]), *(path for path in sys.path if path)]
        self._server = subprocess.Popen(
            [sys.executable, "-c", _SERVER, program, PROGRAMS[program], *paths],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        """End the process."""
        self._server.communicate("")

    def warm(self, *argv: str) -> int:
        """Run it untraced, so that all is loaded that it needs; its exit code."""
        return int(self._ask(argv, out=""))

    def calls(self, *argv: str) -> dict[str, int]:
        """How often it makes each call that can fail, in the thread that makes the most of them."""
        log = self._run(argv, "-e", f"trace={','.join(f'?{call}' for call in ERRORS)}")[2]
        counts = collections.Counter(re.findall(r"^(\d+) +(\w+)\(", log, re.MULTILINE))
        most: dict[str, int] = {}
        for (_, call), count in counts.items():
            most[call] = max(most.get(call, 0), count)
        return most

    def failing(self, call: str, error: str, number: int, *argv: str) -> tuple[int, str, bool]:
        """Run it with the n-th call failing: its exit code, all that it says, and whether it came to that call. HANGS
        stands for the code of one that does not end."""
        inject = f"inject={call}:error={error}:when={number}"
        code, said, log = self._run(argv, "-e", f"trace={call}", "-e", inject)
        return code, said, "(INJECTED)" in log

    def _run(self, argv: tuple[str, ...], *options: str) -> tuple[int, str, str]:
        out, log = self._folder / "out", self._folder / "log"
        out.unlink(missing_ok=True)
        pid = int(self._ask(argv, out=str(out)))
        command = ["strace", "-f", "-p", str(pid), "-o", str(log), *options]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as strace:
            assert strace.stderr is not None
            line = strace.stderr.readline()
            assert "attached" in line, line
            self._tell("go")
            hangs = not self._ends(strace, pid, out)
        assert self._server.stdout is not None
        code = int(self._server.stdout.readline())
        said, traced = (path.read_text(errors="replace") for path in (out, log))
        return HANGS if hangs else code, said, traced

    def _ends(self, strace: subprocess.Popen[str], pid: int, out: Path) -> bool:
        deadline, asked = time.monotonic() + PATIENCE, self._done is None
        while time.monotonic() < deadline:
            with contextlib.suppress(subprocess.TimeoutExpired):
                strace.communicate(timeout=PATIENCE if asked else 0.02)
                return True
            if not asked and self._done is not None and out.exists() and self._done(out.read_text(errors="replace")):
                os.kill(pid, signal.SIGTERM)
                asked = True
        os.kill(pid, signal.SIGABRT)  # it says where it is
        strace.communicate()
        return False

    def _ask(self, argv: tuple[str, ...], *, out: str) -> str:
        self._tell(json.dumps({"argv": argv, "out": out, "environ": self._environ}))
        assert self._server.stdout is not None
        return self._server.stdout.readline()

    def _tell(self, line: str) -> None:
        assert self._server.stdin is not None
        self._server.stdin.write(line + "\n")
        self._server.stdin.flush()


def why_not() -> str | None:
    """Why processes cannot be traced here; None if they can."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    tried = subprocess.run(
        ["strace", "-o", os.devnull, "-e", "inject=getpid:error=EPERM", "true"], capture_output=True, check=False
    )
    return None if tried.returncode == 0 else "strace may not trace here"


FULL = os.environ.get("CKPTGUARD_CAMPAIGN") == "full"
SAMPLES = 1000 if FULL else 2
CANNOT = why_not()
pytestmark = [
    pytest.mark.campaign,
    pytest.mark.timeout(7200 if FULL else 300),
    pytest.mark.skipif(CANNOT is not None, reason=CANNOT or ""),
]
CODES = (0, 1, 2, 3, 4, 10, 11, 13, 126)  # the last one for a command of supervise that cannot be started
# What a program says of a mistake of ours, and what it has no reason to say.
NEVER = re.compile(r"Traceback|a mistake in ckptguard|^interrupted$", re.MULTILINE)
OLDER = (600, 500, 400, 300, 100)
COMMANDS = {
    "verify": (("verify", "{run}"), (600,)),
    "status": (("status", "{run}"), (600,)),
    "list": (("list", "{run}"), (600,)),
    "show": (("show", "{run}/model-600"), (600,)),
    "diff": (("diff", "{run}/model-600", "{run}/model-500"), (600,)),
    "sums": (("sums", "{run}/model-600"), (600,)),
    "incidents": (("incidents", "{run}"), (600,)),
    "doctor": (("doctor", "{run}"), (600,)),
    "bisect": (("bisect", "{run}"), (600,)),
    "accept": (("accept", "{run}", "400"), (600,)),
    "pin": (("pin", "{run}/model-400"), (600,)),
    "unpin": (("unpin", "{run}/model-100"), (600,)),
    "silence": (("silence", "{run}", "--until", "8h"), (600,)),
    "supervise": (("supervise", "{run}", "--", "true"), (600,)),
    "known-good": (("known-good", "{run}", "--read"), (600,)),
    "restore": (("restore", "{run}", "--to", "{dest}"), (600,)),
    "roll back": (("rollback", "{run}", "--step", "500", "--force"), OLDER),
    "put back": (("rollback", "{run}", "--step", "300", "--force"), OLDER),
    "scrub": (("scrub", "{run}"), (600,)),
    "repair": (("repair", "{run}"), (600,)),
    "prune": (("prune", "{run}", "--keep-last", "2"), (600,)),
    "replicate": (("replicate", "{run}", "--to", "{replica}"), (600,)),
}
NONE_LEFT = Operation(lambda run, stage: None)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """Starts programs, with quick settings, one thread, and a runtime folder of their own."""
    folder = tmp_path_factory.mktemp("programs")
    (folder / "runtime").mkdir(mode=0o700)
    settings = {"SETTLE": "0", "WORKERS": "1", "SCAN_INTERVAL": "0.05"}
    environ = {f"CKPTGUARD_{name}": value for name, value in settings.items()}
    started = {}

    def start(name, done=None):
        if name not in started:
            started[name] = Traced(name, folder, environ | {"XDG_RUNTIME_DIR": str(folder / "runtime")}, done)
        return started[name]

    yield start
    for one in started.values():
        one.close()


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A run in which every command has something to do, and what was saved in it."""
    folder = tmp_path_factory.mktemp("template") / "run"
    folder.mkdir()
    return str(folder), build(str(folder), pending=True)


@pytest.fixture
def stages(template, tmp_path):
    """Copies of the run, one after the other."""
    numbers = itertools.count()

    def make():
        folder = tmp_path / f"stage-{next(numbers)}"
        folder.mkdir()
        stage = Stage(url=str(folder / "run"), replica=str(folder / "replica"), dest=folder / "dest")
        clone(template[0], stage.url)
        return stage

    return make


def tree(url):
    """What lies there: any change shows in a name, a size or a time."""
    found = {path: path.lstat() for path in Path(url).rglob("*")}
    return {str(path): (info.st_size, info.st_mtime_ns, info.st_ino) for path, info in found.items()}


def drawn(counts, name):
    """Failures to try: (call, error, number). Which ones follows from the name; no kind of call is left out."""
    generator = random.Random(name)
    every = {call: [(call, e, n) for e in ERRORS[call] for n in range(1, most + 1)] for call, most in counts.items()}
    for cases in every.values():
        generator.shuffle(cases)
    in_turn = [case for row in itertools.zip_longest(*every.values()) for case in row if case is not None]
    first, rest = in_turn[: len(every)], in_turn[len(every) :]
    generator.shuffle(first)
    return (first + rest)[:SAMPLES]


def wrong_words(code, said):
    """What is wrong in how it ended."""
    if code == HANGS:
        return [f"it hangs: {said[-3000:]}"]
    return [f"it ended with {code}"] * (code not in CODES) + [f"it says {said[-1500:]}"] * bool(NEVER.search(said))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_survives_each_failure(name, template, stages, program, capsys):
    """It says what is wrong or goes on. The next pass, by a healthy system, finds all that was there."""
    words, known = COMMANDS[name]
    traced = program("ckptguard")

    def argv(stage):
        return [word.format(run=stage.url, replica=stage.replica, dest=stage.dest) for word in words]

    if name != "supervise":  # it takes what its process starts for its own
        traced.warm(*argv(stages()))
    counts = traced.calls(*argv(stages()))
    wrong, cases = [], drawn(counts, name)
    for case in cases:
        stage = stages()
        before = tree(stage.url)
        code, said, _ = traced.failing(*case, *argv(stage))
        found = wrong_words(code, said)
        if tree(stage.url) != before or Path(stage.replica).exists():
            # A pass may have come to 700 before, and comes to it now.
            operation = Operation(NONE_LEFT.act, known=(*known, 700))
            found += violations(stage, template[1], operation)
            # What a replica's own daemon collects is no matter.
            arrived = arrived_wrong(stage, template[1])
            found += [one for one in arrived if not one.startswith("left in the replica")]
        wrong += [f"{name}, {case}, {code}: {one}" for one in found]
        shutil.rmtree(Path(stage.url).parent)
    report(capsys, name, cases, wrong)


def test_the_daemon_survives_each_failure(template, stages, program, capsys):
    """It verifies the save that nobody looked at, or says that it cannot: what fails in one scanning process fails in
    the next one too. It ends when it is asked to."""

    def done(said):
        return any(word in said for word in ('"id":"700.1"', "trying again", "could_not_tell"))

    traced = program("ckptguard-daemon", done)
    counts = traced.calls(stages().url)
    wrong, cases = [], drawn(counts, "daemon")
    for case in cases:
        stage = stages()
        code, said, _ = traced.failing(*case, stage.url)
        found = wrong_words(code, said)
        found += violations(stage, template[1], Operation(NONE_LEFT.act, known=(600, 700)))
        wrong += [f"the daemon, {case}, {code}: {one}" for one in found]
        shutil.rmtree(Path(stage.url).parent)
    report(capsys, "the daemon", cases, wrong)


@pytest.mark.torch
def test_a_guarded_training_survives_each_failure(program, tmp_path, capsys):
    """Once it has begun it ends with the same weights as if nothing had failed, and nothing that it saved is bad."""
    traced = program("train")
    numbers = itertools.count()

    def run():
        return str(tmp_path / f"run-{next(numbers)}")

    assert traced.warm(run()) == 0
    learnt = traced.failing("getcwd", "ENOMEM", 1000, run())[1]
    assert re.fullmatch(r"ckptguard: [^\n]*training starts from scratch\nbegun\nlearnt \w+\n", learnt)
    counts = traced.calls(run())
    # Torch's own threads are none of this.
    counts = {call: most for call, most in counts.items() if call not in ("clone", "clone3")}
    wrong, cases = [], drawn(counts, "guard")
    for case in cases:
        place = run()
        code, said, _ = traced.failing(*case, place)
        found = wrong_words(code, said)
        if "begun" in said and (code != 0 or learnt.splitlines()[-1] not in said):
            found.append(f"it did not learn the same: {said[-1500:]}")
        if Path(place).is_dir():
            opened = open_run(place)
            cycle(opened)
            found += [f"{s.path} is bad" for s in survey(look(opened)) if s.outcome is Outcome.BAD]
            shutil.rmtree(place)
        wrong += [f"training, {case}, {code}: {one}" for one in found]
    report(capsys, "a training", cases, wrong)


def report(capsys, name, cases, wrong):
    """Nothing may be wrong."""
    if FULL:
        with capsys.disabled():
            print(f"\n{name}: {len(cases)} failures, {len(wrong)} violations")
    assert len(cases) >= min(SAMPLES // 2, 35)  # a short command makes few calls, also where all of them are tried
    assert not wrong, "\n".join([f"{len(wrong)} violations in {len(cases)} failures:", *wrong[:20]])
