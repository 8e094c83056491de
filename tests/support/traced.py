"""Programs whose n-th call of the system fails: strace follows a process that has loaded all it needs already.

One process loads the program, and forks for each request. The child waits until strace has it, so that a call's number
counts what the program does, and not how Python starts.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

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
    """One of the `PROGRAMS`, and strace to fail its calls. `environ` is the program's. `done` says by what it printed
    that a program which does not end by itself has done enough: it is asked to end then."""

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
