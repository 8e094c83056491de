"""A real Slurm of one node: slurmctld and slurmd on loopback, without munge, with an epilog and a prolog of the test's
choice."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from servers.processes import free_port, needed, running

_CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={ctld_port}
SlurmdPort={node_port}
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/linear
ReturnToService=2
KillWait=1
SchedulerParameters=batch_sched_delay=0,sched_interval=1
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/node.pid
Prolog={folder}/prolog
PrologFlags=Alloc
Epilog={folder}/epilog
NodeName={host} NodeAddr=127.0.0.1 CPUs=1
PartitionName=all Nodes=ALL Default=YES
"""
_PATIENCE = 120.0
_NOTHING = "#!/bin/sh\nexit 0\n"
JOB_USER = "nobody"


@dataclass(frozen=True)
class Slurm:
    """A running cluster of one node. Jobs belong to a user without rights where that is possible."""

    folder: Path  # others may enter it
    bin: Path  # ckptguard and ckptguard-daemon, which that user can run
    host: str
    uid: int
    gid: int

    def install(self, name: str, script: str) -> None:
        """Put a script in the place of `prolog` or `epilog`."""
        place = self.folder / name
        temporary = place.with_suffix(".new")
        temporary.write_text(script, encoding="utf-8")
        temporary.chmod(0o755)
        temporary.rename(place)

    def place(self, name: str) -> Path:
        """A new folder of the job's user, whatever other tests called theirs."""
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.folder))
        folder.chmod(0o755)
        os.chown(folder, self.uid, self.gid)
        return folder

    def submit(self, place: Path, script: str, *options: str) -> str:
        """Submit a job that works in a folder; its number."""
        user = () if self.uid == os.getuid() else ("--uid", str(self.uid), "--gid", str(self.gid))
        said = self.call(
            "sbatch", "--parsable", *user, *options, "--chdir", str(place), "--output", str(place / "out"), text=script
        )
        return said.strip()

    def until_ended(self, job: str) -> str:
        """Wait until a job, with all tasks of an array, and its epilog have ended; the state of the node."""
        goes_on = {"PENDING", "RUNNING", "COMPLETING", "CONFIGURING"}
        self.until(lambda: goes_on.isdisjoint(self.state_of(job).split()))
        self.until(lambda: not any(word in self.node() for word in ("COMPLETING", "ALLOCATED", "MIXED")))
        return self.node()

    def state_of(self, job: str) -> str:
        """RUNNING, COMPLETED, ... A line for each task of an array."""
        return self.call("squeue", "--noheader", "--states=all", "--format=%T", "--jobs", job).strip()

    def node(self) -> str:
        """The node's state: IDLE, or with DRAIN in it where Slurm gives it no more jobs."""
        words = self.call("scontrol", "--oneliner", "show", "node", self.host).split()
        return next(word.removeprefix("State=") for word in words if word.startswith("State="))

    def resume(self) -> None:
        """Let a drained node have jobs again."""
        self.call("scontrol", "update", f"nodename={self.host}", "state=resume")

    def call(self, *command: str, text: str | None = None) -> str:
        """What one of Slurm's commands says."""
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, check=False, timeout=_PATIENCE, env=self.environment
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    @property
    def environment(self) -> dict[str, str]:
        """What its commands need."""
        return {"PATH": os.defpath + ":/usr/bin:/usr/sbin", "SLURM_CONF": str(self.folder / "slurm.conf"), "LANG": "C"}

    def until(self, is_so: Callable[[], bool]) -> None:
        """Wait for a state of the cluster."""
        deadline = time.monotonic() + _PATIENCE
        while not is_so():
            assert time.monotonic() < deadline, "".join(p.read_text()[-2000:] for p in self.folder.glob("*.log"))
            threading.Event().wait(0.1)


@contextlib.contextmanager
def slurm(_: Path) -> Iterator[Slurm]:
    """A running cluster. Its folder is not the tests', which its jobs' user could not enter."""
    ctld, node = needed("slurmctld", "slurmd", package="Slurm")
    needed("sbatch", "scontrol", package="Slurm")
    folder = Path(tempfile.mkdtemp(prefix="ckptguard-slurm-"))
    folder.chmod(0o755)
    try:
        (folder / "bin").mkdir()
        for module in ("ckptguard", "ckptguard_daemon"):
            paths = os.pathsep.join(os.path.abspath(path) for path in sys.path if path)
            program = folder / "bin" / module.replace("_", "-")
            program.write_text(f'#!/bin/sh\nPYTHONPATH="{paths}" exec "{sys.executable}" -m {module} "$@"\n')
            program.chmod(0o755)
        uid, gid = _job_user(folder / "bin" / "ckptguard")
        found = Slurm(folder, folder / "bin", socket.gethostname().partition(".")[0], uid, gid)
        for name in ("state", "spool"):
            (folder / name).mkdir()
        for name in ("prolog", "epilog"):
            found.install(name, _NOTHING)
        config = _CONFIG.format(
            host=found.host, user=getpass.getuser(), folder=folder, ctld_port=free_port(), node_port=free_port()
        )
        (folder / "slurm.conf").write_text(config)

        def answers() -> bool:
            done = subprocess.run(["scontrol", "ping"], env=found.environment, capture_output=True, check=False)
            return done.returncode == 0

        with (
            running([ctld, "-D", "-i"], folder / "ctld.log", answers, env=found.environment),
            running([node, "-D"], folder / "node.log", lambda: found.node() == "IDLE", env=found.environment),
        ):
            yield found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _job_user(program: Path) -> tuple[int, int]:
    """A user without rights if we may choose, and if it can run our programs; else our own."""
    if os.getuid() == 0:
        import pwd

        user = pwd.getpwnam(JOB_USER)
        as_user = ["setpriv", "--reuid", str(user.pw_uid), "--regid", str(user.pw_gid), "--clear-groups"]
        if subprocess.run([*as_user, str(program), "--version"], capture_output=True, check=False).returncode == 0:
            return user.pw_uid, user.pw_gid
    return os.getuid(), os.getgid()
