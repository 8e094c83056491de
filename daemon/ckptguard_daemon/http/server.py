"""The HTTP server: uvicorn in a thread, on a socket of ours."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading

import uvicorn
from starlette.types import ASGIApp

from ckptguard_daemon.http.connections import Connections
from ckptguard_daemon.log import log

_START_SECONDS, _STOP_SECONDS = 10.0, 2.0


class HttpServer:
    """uvicorn in its own thread, on a socket that is already bound, until `close`."""

    def __init__(self, application: ASGIApp, listening: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        config = uvicorn.Config(
            application,
            log_config=None,
            access_log=False,
            log_level="error",  # below that anybody could fill the log
            lifespan="off",
            http=Connections(tls),  # type: ignore[arg-type]
            ws="none",
            loop="asyncio",
            server_header=False,
            proxy_headers=False,  # anybody could send them
            timeout_keep_alive=5,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._listening = listening
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="http", daemon=True)

    def start(self) -> bool:
        """Start to serve. Returns whether that worked."""
        self._thread.start()
        return self._started.wait(_START_SECONDS) and self._thread.is_alive()

    def begin_to_close(self) -> None:
        """Take no more connections. Returns at once."""
        self._server.should_exit = True

    def close(self, seconds: float = _STOP_SECONDS) -> None:
        """Stop serving, and wait this long at most for the end. Waiting requests get a second."""
        self.begin_to_close()
        if self._thread.ident is not None:
            self._thread.join(timeout=max(0.0, seconds))

    def _serve(self) -> None:
        try:
            asyncio.run(self._serve_and_tell())
        except (Exception, SystemExit) as error:
            log("http_failed", level="error", reason=f"{type(error).__name__}: {error}")
        finally:
            self._started.set()

    async def _serve_and_tell(self) -> None:
        serving = asyncio.create_task(self._server.serve(sockets=[self._listening]))
        while not self._server.started and not serving.done():
            await asyncio.sleep(0.005)
        self._started.set()
        await serving
