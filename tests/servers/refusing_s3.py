"""An S3 that refuses every request as its path says: ``/BUCKET/STATUS-CODE/...``. A HEAD, and "Unsaid", get no body."""

from __future__ import annotations

import contextlib
import re
import ssl
from collections import Counter
from collections.abc import Iterator
from urllib.parse import unquote

from servers.web_servers import Quiet, served

_ERROR = '<?xml version="1.0"?><Error><Code>{}</Code><Message>Words of {}</Message><RequestId>1</RequestId></Error>'


class RefusingS3:
    """Where it listens, and how often each answer was asked for."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: Counter[str] = Counter()

    @contextlib.contextmanager
    def running(self, tls: ssl.SSLContext | None = None) -> Iterator[RefusingS3]:
        """Serve at `url`."""
        counted = self.asked

        class Request(Quiet):
            protocol_version = "HTTP/1.1"

            def refuse(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                wanted = re.search(r"[/=](\d{3})-([\w.]+)", unquote(self.path))
                # After a redirect botocore asks the bucket itself for its region.
                status, code = wanted.groups() if wanted is not None else ("403", "Region")
                counted[code] += 1
                body = b"" if self.command == "HEAD" or code == "Unsaid" else _ERROR.format(code, code).encode()
                self.send_response_only(int(status))
                self.send_header("Content-Type", "application/xml")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = refuse  # noqa: N815 - the library's names

        with served(Request, tls) as self.url:
            yield self
