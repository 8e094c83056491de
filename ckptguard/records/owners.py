"""Which process wrote a record, and whether it is known to have ended."""

from __future__ import annotations

import os

import msgspec

from ckptguard.records.daemon_record import this_host


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """A process. `namespace` is that of its pid (a container has its own) and `started` its start in clock ticks since
    the machine's; both are "" where the system tells none."""

    host: str
    boot_id: str
    pid: int
    namespace: str = ""
    started: str = ""


def this_process() -> Owner:
    """The process that asks."""
    host, boot_id = this_host()
    pid = os.getpid()
    return Owner(host=host, boot_id=boot_id, pid=pid, namespace=_namespace(), started=_state(pid)[1])


def is_here(owner: Owner) -> bool:
    """Whether it can be told if the process is gone: it is one of this start of this machine, and of this container."""
    here = (owner.host, owner.boot_id) == this_host() and owner.namespace == _namespace()
    return here and owner.boot_id != "" and 0 < owner.pid < 2**31


def has_ended(owner: Owner) -> bool:
    """Whether the process is known to be gone. False where that cannot be told: it ran on another machine, in another
    container, or before a restart."""
    if not is_here(owner):
        return False
    try:
        os.kill(owner.pid, 0)  # asks, and sends nothing
    except ProcessLookupError:
        return True
    except OSError:
        pass  # somebody else's, and there
    state, started = _state(owner.pid)
    return state in ("Z", "X") or (started != "" and owner.started not in ("", started))


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _state(pid: int) -> tuple[str, str]:
    """(state, start) of a process as the kernel tells them."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()  # its name, before that, may hold anything
    except OSError:
        return "", ""
    return (fields[0], fields[19]) if len(fields) > 19 else ("", "")
