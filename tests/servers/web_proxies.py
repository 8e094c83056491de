"""nginx and Caddy on loopback, with the files that the daemon prints."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from servers.processes import listens, needed, running

_NGINX = """{user}
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/nginx.log;
events {{ worker_connections 4096; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/site.conf;
}}
"""


@contextlib.contextmanager
def nginx(folder: Path, text: str, port: int) -> Iterator[None]:
    """nginx with a file of its conf.d. Raises NotInstalledError."""
    program = needed("nginx", package="nginx-light")[0]
    (folder / "site.conf").write_text(fitted(text, {"listen 443": f"listen 127.0.0.1:{port}"}))
    config = folder / "nginx.conf"
    config.write_text(_NGINX.format(folder=folder, user="user root;" if os.geteuid() == 0 else ""))
    command = [program, "-p", str(folder), "-c", str(config), "-e", str(folder / "nginx.log")]
    with running(command, folder / "nginx.out", lambda: listens(port), cwd=folder):
        yield


@contextlib.contextmanager
def caddy(folder: Path, text: str, port: int) -> Iterator[None]:
    """Caddy with a Caddyfile. Raises NotInstalledError."""
    program = needed("caddy", package="caddy")[0]
    alone = "{\n\tadmin off\n\tauto_https disable_redirects\n\tskip_install_trust\n\tdefault_bind 127.0.0.1\n"
    config = folder / "Caddyfile"
    config.write_text(fitted(text, {"\n{\n": f"\n{alone}", "\nckpt.example.org {": f"\nlocalhost:{port} {{"}))
    command = [program, "run", "--config", str(config), "--adapter", "caddyfile"]
    environment = {**os.environ, "HOME": str(folder), "XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
    with running(command, folder / "caddy.log", lambda: listens(port), cwd=folder, env=environment):
        yield


PROXIES: Mapping[str, Callable[[Path, str, int], AbstractContextManager[None]]] = {"nginx": nginx, "caddy": caddy}


def fitted(text: str, changes: Mapping[str, str]) -> str:
    """A file with other places. Each of them must be in it."""
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    return text
