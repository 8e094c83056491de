"""The page beside a training that goes wrong: what happens is seen as it happens, and nothing is loaded again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.browsing import Dashboard, Watched
from support.daemon_process import PATIENCE, save, until

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]
# How many pixels of a canvas have about the colour of a token: the edges of thin lines are mixed with what is behind.
# It only reads, so it may be asked again and again.
PAINTED = """(canvas, token) => {
  const probe = document.body.appendChild(document.createElement("span"));
  probe.style.color = `var(${token})`;
  const [r, g, b] = getComputedStyle(probe).color.match(/[0-9.]+/g).map(Number);
  probe.remove();
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const far = (i) => Math.abs(data[i] - r) + Math.abs(data[i + 1] - g) + Math.abs(data[i + 2] - b) + 255 - data[i + 3];
  let found = 0;
  for (let i = 0; i < data.length; i += 4) found += far(i) < 90;
  return found;
}"""


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts the training of a small vision-language model, in which one picture overflows fp16."""
    started: list[subprocess.Popen[bytes]] = []

    def start(run: Path, daemon: Dashboard) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(ROOT / "examples/cases/nanovlm.py"), str(run)]
        place = {"XDG_RUNTIME_DIR": str(daemon.folder)}
        with (tmp_path / "training.log").open("wb") as log:
            started.append(subprocess.Popen(command, cwd=tmp_path, env={**os.environ, **place}, stdout=log, stderr=log))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
    print((tmp_path / "training.log").read_text()[-3000:])


def painted(page, canvas: str, token: str) -> int:
    """How many pixels of the first such canvas have this colour."""
    return page.locator(canvas).first.evaluate(PAINTED, token)


def test_a_poisoned_training_is_seen_as_it_happens(
    run: Path,
    serve: Callable[..., Dashboard],
    look: Callable[..., Watched],
    train: Callable[..., subprocess.Popen[bytes]],
) -> None:
    """Checkpoints, the poison in the curve, the incident and the arrow back come into the open page by themselves."""
    daemon = serve(run)
    watched = look(daemon)
    page = watched.log_in()
    loads: list[str] = []
    page.get_by_role("link", name="run", exact=True).click()
    page.get_by_role("heading", name="Timeline").wait_for()
    page.on("load", lambda _: loads.append(page.url))
    training = train(run, daemon)
    page.locator(".events .outcome.good").first.wait_for()
    incident = page.locator(".incidents li").first
    incident.get_by_text("went back to step 20").wait_for()
    # The curve has the loss that is no number, and the timeline the arrow.
    page.locator("[role=img][aria-label^='Loss:'][aria-label*='not finite']").wait_for()
    until(lambda: painted(page, ".timeline canvas", "--accent") > 40, "the arrow")
    until(lambda: painted(page, "[aria-label^='Loss:'] canvas", "--bad") > 20, "the poison in the curve")
    assert training.wait(PATIENCE) == 0
    page.locator(".status.good").wait_for()
    incident.get_by_role("link").click()
    page.get_by_role("heading", name=re.compile("overflow|fp16|nan", re.IGNORECASE)).first.wait_for()
    page.get_by_role("heading", name="Likely cause, and what to do").wait_for()
    page.get_by_text("went back from step 26 to step 20").first.wait_for()
    with watched.context.expect_page() as opened:
        page.get_by_role("link", name="Report on one page").click()
    opened.value.get_by_text("What was done").first.wait_for()
    assert loads == []


def test_the_page_goes_on_with_a_daemon_that_was_killed(
    run: Path, serve: Callable[..., Dashboard], look: Callable[..., Watched]
) -> None:
    """Two browsers see the daemon's end and its next start by themselves, with what happened meanwhile."""
    save(run, 1)
    daemon = serve(run)
    first, second = look(daemon), look(daemon)
    pages = [first.log_in()]
    daemon.known_good(1)
    second.context.add_cookies(first.context.cookies())
    pages.append(second.open())
    pages[0].goto(daemon.page_of(run))
    for page in pages:
        page.locator(".events .outcome.good").first.wait_for()
        page.locator(".connection.live").wait_for()
    first.may_be_away = second.may_be_away = True
    port = daemon.port
    daemon.kill()
    for page in pages:
        page.locator(".connection.lost").wait_for()
    save(run, 2, nan=True)
    again = serve(run, port=port)
    for page in pages:
        page.locator(".connection.live").wait_for()
        page.locator(".events .outcome.bad").first.wait_for()
    first.may_be_away = second.may_be_away = False
    save(run, 3)
    again.known_good(3)
    for page in pages:
        page.locator(".events").get_by_role("link", name="step 3").wait_for()


def test_a_verdict_comes_to_an_open_page_without_another_question(
    run: Path, serve: Callable[..., Dashboard], look: Callable[..., Watched]
) -> None:
    """The event alone shows the verdict: the run's document is not there yet when it is on the page."""
    daemon = serve(run)
    page = look(daemon).log_in()
    page.goto(daemon.page_of(run))
    page.locator(".connection.live").wait_for()
    page.get_by_role("heading", name="Timeline").wait_for()
    page.route("**/v1/runs/**", lambda route: None)  # no further document is answered
    save(run, 7, nan=True)
    page.locator(".events .outcome.bad").wait_for()
    page.locator(".events").get_by_role("link", name="step 7").first.wait_for()
    page.unroute_all(behavior="ignoreErrors")
