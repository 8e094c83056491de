"""Call a plugin in a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import IO, TypeVar

import msgspec

from ckptguard.errors import CkptguardError, WorkerError
from ckptguard.formats.strict_json import printable
from ckptguard.plugins.installed import Plugin, trusted_paths
from ckptguard.plugins.messages import PluginAnswer, PluginCall
from ckptguard.scan.process.worker_process import scrubbed

CALL_SECONDS = 60.0
_TICK = 0.5  # how soon a stop is noticed
_LARGEST_ANSWER = 256 * 1024**2
_Result = TypeVar("_Result")


class PluginError(CkptguardError, kind="plugin"):
    """A plugin gave no usable answer. It is no verdict."""


def call_plugin(
    plugin: Plugin,
    argument: object,
    returns: type[_Result],
    *,
    memory: int,
    seconds: float = CALL_SECONDS,
    stopped: Callable[[], bool] = bool,
    hide: Callable[[str], str] = str,
) -> _Result:
    """Return what a plugin returns for an argument. Its process gets no secrets of ours, this much memory and this much
    time, unless it is `stopped`. Raises PluginError with a sentence if it is refused, fails, is too slow, or returns
    something else. `hide` takes secrets out of what the plugin says of its failure."""
    if plugin.refused:
        raise PluginError(f"the plugin {plugin.label} is not used: {plugin.refused}")
    with _answers() as answers:
        process = start_host(memory, answers.fileno())
        assert process.stdin is not None
        try:
            _converse(process, encoded(plugin, argument), plugin.label, seconds, stopped)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # also what it started
            with contextlib.suppress(OSError):
                process.stdin.close()
            process.wait()
        answers.seek(0)
        text = answers.read(_LARGEST_ANSWER + 1)
    try:
        answer = msgspec.msgpack.decode(text, type=PluginAnswer)
        if answer.failure:
            raise PluginError(f"the plugin {plugin.label} failed: {printable(hide(answer.failure))}")
        return msgspec.msgpack.decode(answer.result, type=returns)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        ended = f"its process ended with {process.returncode}" if not text else f"it returned something else: {error}"
        raise PluginError(f"the plugin {plugin.label} failed: {printable(ended)}") from error


def _answers() -> IO[bytes]:
    try:
        return tempfile.TemporaryFile()
    except OSError as error:
        raise PluginError(f"there is no place for the answer of a plugin: {error.strerror}") from error


def _converse(
    process: subprocess.Popen[bytes], said: bytes | None, label: str, seconds: float, stopped: Callable[[], bool]
) -> None:
    """Send the call, and wait until the process has ended."""
    until = time.monotonic() + seconds
    while not stopped():
        left = until - time.monotonic()
        if left <= 0:
            raise PluginError(f"the plugin {label} took longer than {seconds:.0f} seconds")
        try:
            process.communicate(said, timeout=min(left, _TICK))
            return
        except subprocess.TimeoutExpired:
            said = None  # it is being sent
    raise WorkerError("the scan was stopped")


def encoded(plugin: Plugin, argument: object) -> bytes:
    """Return the call for the stdin of its process."""
    return msgspec.msgpack.encode(PluginCall(plugin.kind, plugin.entry, msgspec.Raw(msgspec.msgpack.encode(argument))))


def host_command(memory: int) -> tuple[str, ...]:
    """Return the command of a process that makes a call of ours."""
    return (sys.executable, "-P", "-m", "ckptguard.plugins.host", str(memory), str(os.getpid()))


def start_host(memory: int, answers: int) -> subprocess.Popen[bytes]:
    """Start it, in a session of its own. Raises PluginError if that fails."""
    try:
        return subprocess.Popen(
            host_command(memory),
            stdin=subprocess.PIPE,
            stdout=answers,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env=scrubbed(os.environ, trusted_paths()),
            start_new_session=True,
        )
    except OSError as error:
        raise PluginError(f"a process for a plugin cannot be started: {error.strerror}") from error
