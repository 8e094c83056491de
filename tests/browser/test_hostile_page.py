"""Names, numbers and records of somebody who means harm, or of chance: they are text, and no script fails."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from support.browsing import Dashboard, Watched
from support.daemon_process import save, until
from support.tiny_files import safetensors_head

MARKUP = "<img src=x onerror=boom()>"
SCRIPT = '"><script>boom()</script>'
ARROW = "\u202egnp.exe\u2066"
LONG = "w" * 4000
NAMES = (
    MARKUP,
    SCRIPT,
    "javascript:boom()",
    "{{constructor}}",
    "${boom()}",
    ARROW,
    LONG,
    "a\0b\nc\x1b[31m",
    "&lt;b&gt;",
)
FILES = (
    "<img src=x onerror=boom()>-1",
    "\u202eevil-2",
    "'\"><svg onload=boom()>-3",
    "%2e%2e%3Cb%3E-4",
    "x" * 200 + "-5",
)


def strange_run(folder: Path) -> Path:
    """A run of such checkpoints, in a folder whose name is markup too. The last one holds NaN and infinities."""
    run = folder / "<b onclick=boom()>run\u202e"
    run.mkdir(parents=True)
    for number, name in enumerate(FILES, 1):
        write(run / name, number, sick=name is FILES[-1])
    return run


def write(path: Path, seed: int, *, sick: bool) -> None:
    """One checkpoint with a tensor of each name, and a trainer's log of what is no number."""
    path.mkdir()
    data = safetensors_head(dict.fromkeys(NAMES, (2, 2)))
    for index in range(len(NAMES)):
        numbers = struct.pack("<4f", *(seed + index + n / 7 for n in range(4)))
        if sick and index < 3:
            numbers = struct.pack("<4f", float("nan"), float("inf"), -float("inf"), 3e38)
        data += numbers
    (path / "model.safetensors").write_bytes(data)
    losses = (2.0, float("nan"), float("inf"), 1e308, -float("inf"))
    log = [{"step": step, "loss": loss, "grad_norm": loss, MARKUP: loss} for step, loss in enumerate(losses, 1)]
    state = {"global_step": seed, "max_steps": 9, "best_metric": float("nan"), "log_history": log}
    (path / "trainer_state.json").write_text(json.dumps(state))
    for file in path.iterdir():
        os.utime(file, (1_767_225_600 + seed, 1_767_225_600 + seed))


pytestmark = pytest.mark.timeout(600)
# What would be markup of ours: elements that no page has, and the call of any name.
FOREIGN = "document.querySelectorAll('main img, main script, main svg[onload], main [onclick], main [onerror]').length"


def test_names_of_any_kind_are_text(
    tmp_path: Path, serve: Callable[..., Dashboard], look: Callable[..., Watched]
) -> None:
    """Every page shows a run of hostile names: nothing of them is executed, and nothing becomes an element."""
    run = strange_run(tmp_path)
    daemon = serve(run)
    daemon.outcome(5)
    status, _ = daemon.post("incidents", {"reason": SCRIPT, "cause": MARKUP, "step": 5, "evidence": {MARKUP: "nan"}})
    assert status == 201
    watched = look(daemon)
    calls: list[str] = []
    watched.context.expose_function("boom", lambda: calls.append("called"))
    page = watched.log_in()
    page.locator("tbody tr").first.wait_for()
    assert "<b onclick=boom()>run" in page.locator("tbody tr").first.inner_text()
    assert page.evaluate(FOREIGN) == 0
    document = until(lambda: (lambda d: d if d["incidents"] else None)(daemon.ask("page")[1]), "the incident")
    names = [one["name"] for one in document["generations"]]
    assert len(names) == 5
    places = {
        (): ".events li",
        ("heat",): "main canvas",
        ("keep",): "main h2",
        ("diff", names[0], names[-2]): "main h2",
    }
    places |= {("checkpoint", name): "#tensors" for name in names}
    places |= {("shards", name): "main table" for name in names[:1]}
    places[("incident", document["incidents"][0]["name"])] = ".sentence"
    for parts, there in places.items():
        page.goto(daemon.page_of(run, *parts))
        page.locator(there).first.wait_for()
        assert page.evaluate(FOREIGN) == 0, parts
        assert not page.evaluate("document.documentElement.scrollWidth > innerWidth"), parts
    page.goto(daemon.page_of(run))
    page.locator("tbody").get_by_text(MARKUP).first.wait_for()
    assert calls == []


def test_a_run_that_vanishes_and_a_catalogue_that_is_deleted(
    run: Path, serve: Callable[..., Dashboard], look: Callable[..., Watched]
) -> None:
    """The page says what it still knows, goes on, and shows what comes after."""
    save(run, 1)
    daemon = serve(run)
    page = look(daemon).log_in()
    page.goto(daemon.page_of(run))
    page.locator(".events .outcome.good").wait_for()
    for file in Path(daemon.address).parent.glob("*.catalogue*"):
        file.unlink()
    save(run, 2)
    page.locator(".events").get_by_role("link", name="step 2").first.wait_for()
    daemon.known_good(2)
    run.rename(run.with_name("elsewhere"))  # at once: a run that is removed slowly may be written to meanwhile
    page.locator(".status.bad").get_by_text("ended: it was removed").first.wait_for()
    run.mkdir()
    save(run, 3)
    page.locator(".events").get_by_role("link", name="step 3").first.wait_for()
    page.locator(".status.good").wait_for()
