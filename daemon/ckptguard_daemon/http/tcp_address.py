"""Where the daemon listens by TCP."""

from __future__ import annotations

import ipaddress
import re
import socket
from typing import Any

import msgspec

from ckptguard.errors import SettingsError

WRITE_SECONDS = 30.0


class TcpAddress(msgspec.Struct, frozen=True, kw_only=True):
    """An address of this machine. `said` is how the user wrote it."""

    said: str
    host: str
    family: int
    socket_address: Any

    @property
    def is_loopback(self) -> bool:
        """True if no other machine can reach it."""
        return ipaddress.ip_address(self.socket_address[0].partition("%")[0]).is_loopback

    @property
    def is_any(self) -> bool:
        """True if it stands for all addresses of this machine."""
        return ipaddress.ip_address(self.socket_address[0].partition("%")[0]).is_unspecified

    def listen(self) -> socket.socket:
        """Bind and listen. Raises SettingsError."""
        try:
            listening = socket.create_server(self.socket_address, family=self.family, backlog=128)
        except OSError as error:
            raise SettingsError(f"cannot listen at {self.said}: {error.strerror}") from error
        # Connections inherit it: who takes nothing that long has gone.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(WRITE_SECONDS * 1000))
        return listening


def tcp_address(option: str, address: str) -> TcpAddress:
    """Return the address that HOST:PORT names. Raises SettingsError."""
    host, _, port = address.rpartition(":")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
        raise SettingsError(f"`{option} {address}` is not HOST:PORT", hint=f"for example {option} 127.0.0.1:9469")
    host = host.removeprefix("[").removesuffix("]")
    try:
        family, _, _, _, found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise SettingsError(f"`{option} {address}`: there is no address {host}") from error
    return TcpAddress(said=address, host=host, family=family, socket_address=found)


def address_of(listening: socket.socket) -> str:
    """Return the HOST:PORT of a socket."""
    host, port = listening.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
