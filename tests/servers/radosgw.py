"""Ceph's S3 gateway over a cluster of one: a monitor and a storage daemon in memory, all on loopback."""

from __future__ import annotations

import contextlib
import json
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from servers.processes import free_port, listens, needed, running
from servers.s3 import S3Server

_CONFIG = """
[global]
fsid = {fsid}
mon host = [v1:127.0.0.1:{mon_port}]
mon initial members = a
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
run dir = {folder}
admin socket = {folder}/$name.asok
log file = {folder}/$name.log
pid file =
crash dir = {folder}
osd crush chooseleaf type = 0
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pgp num = 8
osd pool default pg autoscale mode = off
mon allow pool size one = true
mon warn on pool no redundancy = false
mon data = {folder}/mon
mon cluster log file = {folder}/cluster.log
paxos propose interval = 0.05
paxos min wait = 0.01
osd data = {folder}/osd
osd journal = {folder}/osd/journal
osd objectstore = memstore
memstore device bytes = {bytes}
osd crush update on start = false
osd class update on start = false
rgw frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
rgw data = {folder}/rgw
rgw thread pool size = 64
rgw enable ops log = false
rgw max listing results = 100
rgw run sync thread = false
"""
_KEY, _SECRET = "CKPTGUARDTESTKEY0001", "ckptguard-test-secret-0123456789abcdef"


@contextlib.contextmanager
def radosgw(folder: Path, *, bytes_of_memory: int = 4 << 30) -> Iterator[S3Server]:
    """A running gateway; everything it needs lies in `folder`."""
    programs = ("ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "monmaptool", "ceph")
    mon, osd, gateway, admin, monmaptool, ceph = needed(*programs, package="Ceph")
    mon_port, port, fsid = free_port(), free_port(), str(uuid.uuid4())
    config = folder / "ceph.conf"
    config.write_text(_CONFIG.format(fsid=fsid, mon_port=mon_port, port=port, folder=folder, bytes=bytes_of_memory))
    for name in ("mon", "osd", "rgw"):
        (folder / name).mkdir()

    def call(*command: str) -> str:
        argv = [*command, "-c", str(config)]
        for _ in range(20):
            done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
            if done.returncode == 0:
                return done.stdout
            if "EPERM" not in done.stderr:  # asked before it had the monitor's map, which is a matter of chance
                break
        raise RuntimeError(f"{command}: {done.stdout}{done.stderr}")

    def daemon(program: str, *arguments: str, ready: Callable[[], bool]) -> contextlib.AbstractContextManager[None]:
        command = [program, "-c", str(config), "-f", *arguments]
        return running(command, folder / f"{Path(program).name}.out", ready)

    monmap = str(folder / "monmap")
    call(monmaptool, "--create", "--fsid", fsid, "--addv", "a", f"[v1:127.0.0.1:{mon_port}]", monmap)
    call(mon, "--mkfs", "-i", "a", "--monmap", monmap)
    with contextlib.ExitStack() as stack:
        stack.enter_context(daemon(mon, "-i", "a", ready=lambda: listens(mon_port)))
        osd_id = str(uuid.uuid4())
        call(ceph, "osd", "new", osd_id, "0")
        # Left to the daemon itself this sometimes fails: it can be too early for it.
        call(ceph, "osd", "crush", "add", "osd.0", "1.0", "root=default")
        call(osd, "-i", "0", "--mkfs", "--osd-uuid", osd_id)

        def up() -> bool:
            return bool(json.loads(call(ceph, "osd", "stat", "-f", "json"))["num_up_osds"] == 1)

        stack.enter_context(daemon(osd, "-i", "0", ready=up))
        user = ("--uid", "test", "--display-name", "test", "--access-key", _KEY, "--secret", _SECRET)
        call(admin, "user", "create", *user)
        stack.enter_context(daemon(gateway, "-n", "client.rgw", ready=lambda: listens(port)))
        yield S3Server(f"http://127.0.0.1:{port}", _KEY, _SECRET)
