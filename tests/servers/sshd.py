"""A real OpenSSH server for SFTP: on loopback, with keys of its own, and no file of the system touched."""

from __future__ import annotations

import contextlib
import getpass
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from servers.processes import free_port, listens, needed, running

_CONFIG = """
ListenAddress 127.0.0.1
Port {port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
MaxStartups 100
MaxSessions 100
Subsystem sftp {sftp_server}
"""


@dataclass(frozen=True)
class SftpServer:
    """Where an SFTP server listens, and what its users need."""

    port: int
    folder: Path  # where its files may lie
    options: dict[str, Any]  # of fsspec, for ``sftp://`` URLs

    def url(self, path: Path) -> str:
        """The URL of a path on it."""
        return f"sftp://127.0.0.1:{self.port}{path}"


@contextlib.contextmanager
def sshd(folder: Path) -> Iterator[SftpServer]:
    """A running server; keys and log lie in `folder`, its files below `folder`/files."""
    server, keygen, sftp_server = needed("sshd", "ssh-keygen", "sftp-server", package="openssh-server")
    for name in ("host_key", "user_key"):
        command = [keygen, "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(folder / name)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    (folder / "authorized_keys").write_text((folder / "user_key.pub").read_text())
    port = free_port()
    config = folder / "sshd_config"
    config.write_text(_CONFIG.format(port=port, folder=folder, sftp_server=sftp_server))
    known = folder / "known_hosts"
    known.write_text(f"[127.0.0.1]:{port} {(folder / 'host_key.pub').read_text()}")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd drops its privileges into this empty folder
    (folder / "files").mkdir()
    with running([server, "-D", "-e", "-f", str(config)], folder / "sshd.log", lambda: listens(port)):
        yield SftpServer(
            port,
            folder / "files",
            {
                "username": getpass.getuser(),
                "client_keys": [str(folder / "user_key")],
                "known_hosts": str(known),
                "config": None,
                "agent_path": None,
                "max_sessions": 10,
            },
        )
