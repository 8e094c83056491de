"""Runs the real command line on many targets, one after another, under watch. Started by `watching.py` as a process.

Reads a list of [name, arguments] as JSON from stdin; writes a line of JSON for each to its first argument's file:
exit code, stdout, stderr, and everything that Python's audit hook saw and that no reading of a checkpoint needs.
Limits: 1 GiB of addresses for the process, and for each target 10 s of CPU of a machine that adds a million numbers in
0.08 s, or as much more as this machine is slower.
"""

from __future__ import annotations

import io
import json
import os
import resource
import sys
import time

GIB = 1 << 30
CPU_SECONDS = 10
A_MILLION = 0.08  # s
# Never needed: whoever does these runs something, speaks to somebody or changes something.
FORBIDDEN = frozenset(
    {
        *("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.startfile", "os.fork", "os.forkpty", "os.kill"),
        *("pty.spawn", "subprocess.Popen", "cpython.run_command", "exec", "compile", "pickle.find_class"),
        *("marshal.loads", "marshal.load", "code.__new__", "ctypes.dlopen", "mmap.__new__", "signal.pthread_kill"),
        *("socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname"),
        *("urllib.Request", "ftplib.connect", "smtplib.connect", "http.client.connect", "webbrowser.open"),
        *("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod"),
        *("os.chown", "os.utime", "os.putenv", "os.unsetenv", "os.setxattr", "os.chdir", "sqlite3.connect"),
        *("shutil.copyfile", "shutil.rmtree", "shutil.move", "tempfile.mkstemp", "tempfile.mkdtemp", "glob.glob"),
    }
)
# What happens once, when our own code or the standard library is first needed.
LOADING = frozenset(("exec", "compile", "marshal.loads", "code.__new__", "ctypes.dlopen"))
COMPILERS = ("importlib._bootstrap", "importlib._bootstrap_external", "ckptguard.values.settings", "msgspec._utils")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Watch:
    """Notes what is seen while it is on. `allowed` are the folders in which files may be opened for reading."""

    def __init__(self, installed: list[str]) -> None:
        self.installed = tuple(installed)
        self.allowed: tuple[str, ...] = ()
        self.writable: tuple[str, ...] = ()
        self.seen: list[str] | None = None
        self.loading = 0

    def hook(self, event: str, args: tuple[object, ...]) -> None:
        """The audit hook."""
        if self.seen is None:
            return
        if event == "import":
            if str(args[0]).partition(".")[0] not in KNOWN:
                self.seen.append(f"import {args[0]}")
        elif event == "open":
            self.opened(args)
        elif event in FORBIDDEN and not (event in LOADING and self.of_our_own()):
            changes = event in ("os.mkdir", "os.link", "os.rename", "os.remove", "os.chmod", "os.utime")
            if not (changes and self.writable):
                self.seen.append(f"{event} {args!r}"[:300])

    def opened(self, args: tuple[object, ...]) -> None:
        """An open is fine in the target, in Python's installation, or of a plain name in an open folder."""
        path, mode, flags = args
        if isinstance(path, int):
            return
        text = os.fsdecode(path)  # type: ignore[arg-type]
        writes = bool(int(flags or 0) & WRITES)  # type: ignore[call-overload]
        if "/" not in text and text != "..":
            if not int(flags or 0) & (os.O_NOFOLLOW | os.O_EXCL) and text != ".":  # type: ignore[call-overload]
                self.seen.append(f"open {text!r} without O_NOFOLLOW")
            elif writes and not self.writable:
                self.seen.append(f"open {text!r} for writing")
            return
        real = os.path.realpath(text)
        places = self.writable if writes else (*self.allowed, *self.installed)
        above = int(flags or 0) & os.O_PATH and any(p.startswith(real.rstrip("/") + "/") for p in self.allowed)  # type: ignore[call-overload]
        if above and not writes:
            return  # looking for the records of a run that the target lies in
        if text != os.devnull and not any(real == p or real.startswith(p.rstrip("/") + "/") for p in places):
            self.seen.append(f"open {text!r} ({mode}, {flags})")

    def of_our_own(self) -> bool:
        """Whether Python's own importer asks for it, or our settings, whose types are compiled as they are read."""
        frame = sys._getframe(2)
        while frame is not None:
            if frame.f_globals.get("__name__") in COMPILERS:
                return True
            frame = frame.f_back
        return False


OURS = "ckptguard click msgspec numpy blake3 isal fsspec rich markdown_it pygments mdurl colorama"
# Parts of the standard library that reading may need and that may not have been loaded yet. Not: what corpora name.
STANDARD = (
    "abc array ast atexit base64 binascii bisect builtins bz2 calendar codecs collections concurrent "
    "configparser contextlib contextvars copy copyreg csv ctypes dataclasses datetime decimal difflib dis "
    "email encodings enum errno fcntl fnmatch fractions functools gc genericpath getpass gettext gzip hashlib "
    "heapq hmac http importlib inspect io ipaddress itertools json keyword linecache locale logging lzma "
    "math mmap multiprocessing ntpath numbers opcode operator os pathlib pickle platform posixpath pprint "
    "queue quopri random re reprlib resource secrets select selectors shutil signal socket ssl stat "
    "string stringprep struct subprocess sys sysconfig tempfile textwrap threading time token tokenize "
    "tomllib traceback types typing unicodedata urllib uuid warnings weakref zipfile zlib "
)
KNOWN = frozenset((OURS + " " + STANDARD).split())
KNOWN = KNOWN | {f"_{name}" for name in KNOWN} | {"_blake2", "_sha1", "_sha2", "_md5", "_hashlib", "_posixsubprocess"}
KNOWN = KNOWN | {"_strptime", "_sitebuiltins", "_compression", "_datetime", "_bootlocale", "_opcode", "_tokenize"}


def run(arguments: list[str]) -> tuple[int, str, str]:
    """One command in this process: exit code, stdout, stderr."""
    from ckptguard.cli import main

    streams = [io.TextIOWrapper(io.BytesIO(), "utf-8", errors="backslashreplace", write_through=True) for _ in range(2)]
    before = sys.argv, sys.stdout, sys.stderr
    sys.argv, sys.stdout, sys.stderr = ["ckptguard", *arguments], streams[0], streams[1]
    try:
        main()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    finally:
        sys.argv, sys.stdout, sys.stderr = before
    texts = [stream.buffer.getvalue().decode("utf-8", "replace") for stream in streams]  # type: ignore[attr-defined]
    return code, texts[0], texts[1]


def cpu_limit() -> int:
    """What 10 s of CPU are on this machine. It is asked before each target, because a shared machine changes."""
    began, total = time.process_time(), 0
    for number in range(1_000_000):
        total += number
    return round(CPU_SECONDS * max(1.0, (time.process_time() - began) / A_MILLION))


def main() -> None:
    """All jobs."""
    given = json.load(sys.stdin)
    watch = Watch(given["installed"])
    sys.addaudithook(watch.hook)
    for arguments in given["warm"]:
        run(arguments)  # what we ourselves import lazily, we import now
    resource.setrlimit(resource.RLIMIT_AS, (GIB, resource.getrlimit(resource.RLIMIT_AS)[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open(sys.argv[1], "w", encoding="utf-8") as answers:
        for job in given["jobs"]:
            limit = cpu_limit()
            used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
            resource.setrlimit(resource.RLIMIT_CPU, (int(used) + limit + 1, resource.RLIM_INFINITY))
            answers.write(json.dumps({"name": job["name"], "began": True}) + "\n")
            answers.flush()
            watch.allowed, watch.writable = tuple(job["allowed"]), tuple(job["writable"])
            watch.seen = seen = []
            code, out, err = run(job["arguments"])
            watch.seen = None
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            answer = {"name": job["name"], "code": code, "out": out, "err": err, "seen": seen, "peak_kib": peak}
            answer["cpu"] = sum(resource.getrusage(resource.RUSAGE_SELF)[:2]) - used
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
