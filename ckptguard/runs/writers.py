"""Can somebody still write a checkpoint? Only on a local disk whose processes we all see can that be excluded.

In doubt there is a writer. Nothing here trusts a file's modification time, which any writer may set: it is the time of
the change of the inode that counts, which the kernel alone sets.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator, Sequence

from ckptguard.layouts import Checkpoint
from ckptguard.records.leases import Lease, list_claims, list_trainings, surely_gone
from ckptguard.records.run import Run
from ckptguard.storage.local.mounts import is_below, mount_of
from ckptguard.values.ids import RECORDS_FOLDER, escape

_LOCAL = frozenset(("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "nilfs2", "tmpfs", "ramfs"))
_HOST_PIDS = "pid:[4026531836]"  # the kernel's constant for the namespace that sees every process
_EXPORTS = "/proc/fs/nfsd/exports"  # the kernel's NFS server writes files without a process
# Programs that the kernel lets nobody look into, and that write no checkpoints.
_CLOSED = frozenset(("(sd-pam)", "ssh-agent", "gpg-agent", "sshd", "sshd-session", "gnome-keyring-d", "fusermount3"))


def pause_between_files(checkpoint: Checkpoint, settle: float) -> float:
    """Return for how many seconds a save must not change before its writer can be excluded.

    The writer of a single file has it open. That of several files may pause between two of them with none open.
    """
    return settle if checkpoint.files == (checkpoint.path,) else 2 * settle


def writer_of(run: Run, checkpoint: Checkpoint, quiet: float) -> str | None:
    """Return why somebody may still write a checkpoint, or None if that is excluded.

    It is excluded if all of this holds: it is on a local disk, and we see all processes that may write there. None of
    them has a file of the run open for writing. No file or folder of the checkpoint changed for `quiet` seconds. And no
    guard of the run may be alive.
    """
    try:
        found = _place(run, checkpoint) or _quiet(run, checkpoint, quiet) or _leased(run)
        return found or _open_file(run, checkpoint)
    except OSError as error:
        return f"who writes it cannot be found out: {(error.strerror or 'unknown').lower()}"


def writers_are_seen(run: Run, checkpoint: Checkpoint) -> bool:
    """True if every process that may write a checkpoint can be seen from here."""
    try:
        return _place(run, checkpoint) is None
    except OSError:
        return False


def _place(run: Run, checkpoint: Checkpoint) -> str | None:
    """Return why the writers of these files cannot be seen from here, or None."""
    if run.storage.root is None:
        return "an object store does not show who writes"
    root = os.path.realpath(run.storage.root)
    kind = mount_of(root)[1]
    if kind not in _LOCAL:
        return f"it is on {kind or 'an unknown file system'}, where writers elsewhere cannot be seen"
    with contextlib.suppress(OSError), open(_EXPORTS, encoding="utf-8", errors="replace") as lines:
        exported = [line.split()[0] for line in lines if line.startswith("/")]
        if any(is_below(root, one) or is_below(one, root) for one in exported):
            return "its disk is exported by NFS, where writers elsewhere cannot be seen"
    if os.readlink("/proc/self/ns/pid") != _HOST_PIDS:
        return "this is a container, which does not see processes outside"
    user = os.geteuid()
    if user != 0 and any(os.lstat(run.storage.path_of(key)).st_uid != user for key in checkpoint.files):
        return "it belongs to another user, whose processes cannot be looked at"
    return None


def _quiet(run: Run, checkpoint: Checkpoint, span: float) -> str | None:
    """Return that it changed within `span` seconds, or None. Without any such span nothing is known to be quiet."""
    if span <= 0:
        return "with settle = 0 no pause shows that its writer has ended"
    paths = {run.storage.path_of(key) for key in (*checkpoint.files, *(e.key for e in checkpoint.irregular))}
    own = run.storage.path_of("" if checkpoint.path == "." else checkpoint.path)
    paths |= {own, *(folder for path in paths if is_below(folder := os.path.dirname(path), own))}
    age = time.time() - max(os.lstat(path).st_ctime for path in paths)
    if 0 <= age < span:
        return f"it changed {age:.0f} s ago, and {span:.0f} s without a change are needed"
    return None if age >= span else "its time is in the future"


def _leased(run: Run) -> str | None:
    """Return which guard of the run may still save, or None."""
    leases: list[Lease] = [*list_claims(run), *list_trainings(run)]
    for lease in leases:
        if not surely_gone(run, lease):
            return f"process {lease.owner.pid} on {lease.owner.host} may still save"
    return None


def _open_file(run: Run, checkpoint: Checkpoint) -> str | None:
    """Return which process has a file of the run open for writing, or may have one, or None."""
    root = os.path.realpath(run.storage.root or "")
    records = os.path.join(root, RECORDS_FOLDER)
    names = {checkpoint.path.rpartition("/")[2], *(entry.name for entry in checkpoint.entries)} - {"."}
    files = [run.storage.path_of(key) for key in checkpoint.files]
    mine, output = os.readlink("/proc/self/ns/mnt"), _our_output() - {*files}
    if checkpoint.path != ".":
        own = run.storage.path_of(checkpoint.path)
        output = {path for path in output if not is_below(path, own)}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            same_paths = os.readlink(f"/proc/{pid}/ns/mnt") == mine
            for path in _written(pid):
                if same_paths and path in output:
                    continue
                # A container has paths of its own: there any file of such a name counts.
                here = same_paths and is_below(path, root) and not is_below(path, records)
                if (
                    here
                    or (same_paths and _is_other_path(path, files))
                    or (not same_paths and not names.isdisjoint(path.split("/")))
                ):
                    return f"process {pid} ({_name(pid)}) has {escape(os.path.basename(path))} open for writing"
        except OSError as error:
            if not isinstance(error, (FileNotFoundError, ProcessLookupError)) and _may_write(pid):
                return f"process {pid} ({_name(pid)}) cannot be looked at"
    return None


def _is_other_path(path: str, files: Sequence[str]) -> bool:
    """True if a path outside the run leads to one of these files under its own name, as a bind mount does."""
    alike = [file for file in files if os.path.basename(file) == os.path.basename(path) and file != path]
    if not alike or mount_of(path)[1] not in _LOCAL:  # others may hang
        return False
    with contextlib.suppress(FileNotFoundError):
        return any(os.path.samefile(path, file) for file in alike)
    return False


def _written(pid: str) -> Iterator[str]:
    """Yield the files that a process has open for writing, or mapped so. Raises OSError if it cannot be looked at."""
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        link = f"/proc/{pid}/fd/{descriptor}"
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if os.lstat(link).st_mode & stat.S_IWUSR:
                yield os.readlink(link).removesuffix(" (deleted)")
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            words = line.rstrip("\n").split(None, 5)
            if len(words) == 6 and words[1][1] == "w" and words[1][3] == "s":
                yield words[5].removesuffix(" (deleted)")


def _our_output() -> set[str]:
    """Return where this process and those that started it write their output and errors. Such a file is no save:
    ``ckptguard rollback RUN > RUN/log``, or a job whose output is in RUN."""
    found: set[str] = set()
    seen, pid = {"0"}, str(os.getpid())
    with contextlib.suppress(OSError, IndexError):
        while pid not in seen:
            seen.add(pid)
            found |= {os.readlink(f"/proc/{pid}/fd/{stream}") for stream in (1, 2)}
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                pid = file.read().rpartition(")")[2].split()[1]
    return found


def _may_write(pid: str) -> bool:
    """True if a process that cannot be looked into may write our files. The machine's first process and those of other
    users do not write ours."""
    if pid == "1":
        return False
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as lines:
            users = next(line.split()[1:] for line in lines if line.startswith("Uid:"))
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            serves_files = b"internal-sftp" in file.read()
    except FileNotFoundError:
        return False  # it has ended
    except (OSError, StopIteration):
        return True
    return str(os.geteuid()) in users and (serves_files or _name(pid) not in _CLOSED)


def _name(pid: str) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return escape(file.read().strip())
    except OSError:
        return "unknown"
