"""An S3 that is quick to start: moto's server, in a process of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from servers.processes import NotInstalledError, free_port, listens, running
from servers.s3 import S3Server

# One request at a time: moto looks and then writes, so conditional puts that run side by side could both win.
# Its routes know no key with a line feed, which S3 does.
_SERVE = """
import sys
from moto.moto_server.utilities import RegexConverter
begin = RegexConverter.__init__
RegexConverter.__init__ = lambda self, url_map, regex: begin(self, url_map, f"(?s:{regex})")
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server
app = DomainDispatcherApplication(create_backend_app)
make_server("127.0.0.1", int(sys.argv[1]), app, threaded="threads" in sys.argv).serve_forever()
"""


@contextlib.contextmanager
def moto_server(folder: Path, *, port: int | None = None, page: int = 100, threads: bool = False) -> Iterator[S3Server]:
    """A running server, on this port or any free one; its log lies in `folder`. A listing has pages of `page` names.
    With `threads` a queue that waits for messages holds nothing up; there is then one writer at most."""
    if importlib.util.find_spec("moto") is None:
        raise NotInstalledError('no moto here: pip install "ckptguard[servers]"')
    port = port or free_port()
    env = {**os.environ, "MOTO_S3_DEFAULT_MAX_KEYS": str(page)}
    with running(
        [sys.executable, "-c", _SERVE, str(port), *(("threads",) if threads else ())],
        folder / "moto.log",
        lambda: listens(port),
        env=env,
    ):
        yield S3Server(f"http://127.0.0.1:{port}", "testing", "testing-secret-key")
