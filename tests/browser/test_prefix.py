"""The page below a path of another site, behind nginx with TLS, as the printed file says."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from ckptguard_daemon.command import command
from click.testing import CliRunner
from servers.fixtures import skip_or_fail
from servers.processes import NotInstalledError, free_port
from servers.web_proxies import fitted, nginx
from support.browsing import Dashboard, Watched
from support.certificates import make_certificate
from support.daemon_process import save

PREFIX = "/tools/ckptguard"


def test_the_page_works_below_a_prefix(
    run: Path, tmp_path: Path, serve: Callable[..., Dashboard], look: Callable[..., Watched]
) -> None:
    """Logging in, the stream, a run's page and an action: no request leaves the prefix, and nothing goes wrong."""
    certificate, key = make_certificate(tmp_path, "proxy")
    port, behind = free_port(), free_port()
    text = re.sub(
        r"(?m)^( *location (?:= )?)/", rf"\1{PREFIX}/", CliRunner().invoke(command, ["--example", "nginx"]).output
    )
    places = {"/etc/ssl/ckpt.pem": certificate, "/etc/ssl/ckpt.key": key, "127.0.0.1:8080": f"127.0.0.1:{behind}"}
    folder = tmp_path / "proxy"
    folder.mkdir()
    save(run, 1)
    try:
        with nginx(folder, fitted(text, places), port):
            daemon = serve(run, port=behind, arguments=("--http-url", f"https://localhost:{port}{PREFIX}"))
            watched = look(daemon, ignore_https_errors=True)
            page = watched.log_in()
            assert page.url.startswith(f"{daemon.origin}/")
            daemon.known_good(1)
            page.goto(daemon.page_of(run))
            page.locator("#checkpoints").wait_for()
            save(run, 2)
            page.get_by_text("net-2.safetensors").first.wait_for()  # the stream said so
            [cookie] = watched.context.cookies()
            assert (cookie["path"], cookie["secure"], cookie["httpOnly"]) == (f"{PREFIX}/", True, True)
            me = page.request.get(f"{daemon.origin}/v1/me")
            assert me.status == 200
    except NotInstalledError as error:
        skip_or_fail(error)
