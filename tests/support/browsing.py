"""A daemon with its page, a real browser that looks at it, and what must never happen there."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ckptguard.storage import normalise_url
from ckptguard.values.ids import run_id_of
from support.daemon_process import PATIENCE, DaemonProcess, until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

LAST = 1000 * PATIENCE  # milliseconds: only what hangs takes longer
SENTENCE = {"playwright": "pip install 'ckptguard[test]'", "chromium": "apt-get install chromium"}


def missing() -> str | None:
    """What a browser needs and this machine does not have, with what to do; None if all is there."""
    try:
        import playwright.sync_api  # noqa: F401 - is it there?
    except ImportError:
        return f"playwright is not installed: {SENTENCE['playwright']}"
    return None if shutil.which("chromium") else f"chromium is not installed: {SENTENCE['chromium']}"


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Debian's chromium. It ends with the block, as its event loop in this thread does."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
            timeout=LAST,
        )
        yield browser
        browser.close()


class Dashboard(DaemonProcess):
    """A daemon over runs, with its page on a loopback port."""

    def __init__(
        self, folder: Path, *runs: Path, role: str = "operator", port: int = 0, arguments: tuple[str, ...] = ()
    ) -> None:
        super().__init__(folder, *runs, arguments=("--http", f"127.0.0.1:{port}", "--link", role, *arguments))

    @property
    def origin(self) -> str:
        """Where the page is."""
        return str(self.logged("http")["url"])

    @property
    def port(self) -> int:
        """Its port, for the next daemon at the same place."""
        return int(self.origin.rpartition(":")[2])

    @property
    def link(self) -> str:
        """The link that logs in once."""
        return until(lambda: self.out_path.read_text().strip(), "a link")

    def page_of(self, run: Path, *parts: str) -> str:
        """The address of a run's page, or of one below."""
        id = run_id_of(normalise_url(run))
        return "/".join((f"{self.origin}/#/run/{id}", *(quote(part, safe="") for part in parts)))


class Watched:
    """A browser's profile in which nothing may go wrong: no error of a script, and no request to elsewhere."""

    def __init__(self, browser: Browser, daemon: Dashboard, **how: Any) -> None:
        self.context: BrowserContext = browser.new_context(**how)
        self.context.set_default_timeout(LAST)
        self.daemon = daemon
        self.wrong: list[str] = []
        self.may_be_away = False  # then failed requests are no errors
        origin = daemon.origin
        self.context.route(lambda url: not url.startswith((f"{origin}/", "data:", "blob:")), self._refuse)
        self.context.on("console", self._console)
        self.context.on("weberror", lambda error: self.wrong.append(f"script: {error.error}"))

    def _refuse(self, route: Any) -> None:
        self.wrong.append(f"request to {route.request.url}")
        route.abort()

    def _console(self, message: Any) -> None:
        if message.type == "error" and not (self.may_be_away and "Failed to load resource" in message.text):
            self.wrong.append(f"console: {message.text} {message.location}")

    def log_in(self) -> Page:
        """A page that came by the link; it shows the fleet."""
        page = self.context.new_page()
        page.goto(self.daemon.link)
        page.get_by_role("heading", name="Fleet").wait_for()
        return page

    def open(self, *parts: str, run: Path | None = None) -> Page:
        """One more page of who is logged in, at the page of a run or one below."""
        page = self.context.new_page()
        page.goto(self.daemon.page_of(run or self.daemon.runs[0], *parts))
        return page


def violations(page: Page) -> list[str]:
    """What axe-core finds wrong in a page: the rule, and the elements."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [f"{one['id']}: {[node['target'] for node in one['nodes'][:5]]}" for one in found]
