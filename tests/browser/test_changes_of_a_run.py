"""The page of a run beside every kind of change: it says what is true now, by itself and without a question."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from support.browsing import Dashboard, Watched
from support.daemon_process import save, until
from support.faults import flip
from support.tiny_files import safetensors_head

pytestmark = pytest.mark.timeout(900)
# What the table and the list of incidents say: (name, save, verdict, where, kept, pinned), and (state, step).
SEEN = """() => [
  [...document.querySelectorAll("table tbody tr")].map((row) => {
    const cells = [...row.querySelectorAll("td,th")].map((cell) => cell.innerText.trim());
    const [name, step] = cells[0].split(/\\n+/);
    return [name, Number(/save (\\d+) of it/.exec(step)?.[1] ?? 1), cells[1], cells[2], cells[3], cells[5]];
  }).sort(),
  [...document.querySelectorAll(".incidents li")].map((line) => [
    line.querySelector(".tag").innerText, Number(/at step ([\\d,]+)/.exec(line.innerText)?.[1])]).sort(),
]"""
MARKS = """async () => {
  const timeline = document.querySelector(".timeline"), said = [];
  const press = async (key) => {
    timeline.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
    await new Promise((done) => setTimeout(done, 50));
    return timeline.querySelector("[role=status]").innerText;
  };
  for (let now = await press("Home"); said.at(-1) !== now; now = await press("ArrowRight")) said.push(now);
  await press("Escape");
  return said;
}"""


def ckptguard(*arguments: object, codes: Iterable[int] = (0,)) -> str:
    """What a command prints; it ends with one of these codes."""
    command = [sys.executable, "-m", "ckptguard", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in codes, (arguments, done.stdout, done.stderr)
    return done.stdout


def truth(run: Path) -> list[list[list[Any]]]:
    """The same as `SEEN`, from the commands, which read the records themselves."""

    def where(one: dict[str, Any]) -> str:
        places = {"quarantined": "in quarantine", "in_place": "in place", "trashed": "in the trash"}
        kept = "kept copy only" if one["kept"] else "gone"
        return next((words for key, words in places.items() if one[key]), kept)

    checkpoints = json.loads(ckptguard("list", run, "--json"))["checkpoints"]
    rows = [
        [
            one["path"],
            int((one["id"] or "1").rpartition(".")[2]),
            one["outcome"],
            where(one),
            one["kept_how"] or "no",
            "pinned" if one["pins"] else "no",
        ]
        for one in checkpoints
    ]
    incidents = json.loads(ckptguard("incidents", run, "--json"))["incidents"]
    return [sorted(rows), sorted([i["state"], i["step"]] for i in incidents)]


def save_like(run: Path, step: int, name: str, numbers: bytes) -> None:
    """A save of one tensor, under another name first."""
    temporary, path = run / f".tmp-{step}", run / f"net-{step}.safetensors"
    temporary.write_bytes(safetensors_head({name: [len(numbers) // 4]}) + numbers)
    os.utime(temporary, (time.time() - 10, time.time() - 10))
    temporary.rename(path)


def test_a_run_is_shown_as_it_is_after_every_change(
    run: Path, serve: Callable[..., Dashboard], look: Callable[..., Watched]
) -> None:
    """One page stays open: a save, poison, a rollback, pins, silences, doubts lifted, damage repaired or sealed anew,
    what is pruned, and the daemon's next start. After each, it says what the commands say, and asks only when told."""
    daemon = serve(run)
    watched = look(daemon)
    page = watched.log_in()
    page.goto(daemon.page_of(run))
    page.locator(".connection.live").wait_for()
    page.evaluate("window.stays = true")

    def agrees(after: str, *, protected: bool = True, newest: str | None = None, silenced: bool = False) -> None:
        seen: list[Any] = []

        def look_again() -> bool:
            seen[:] = [page.evaluate(SEEN), truth(run)]
            seen.append([page.locator(".status.good").count() == 1, protected])
            said = page.get_by_text("The newest save is").all_inner_texts()
            seen.append([[text.split(".")[0] for text in said], [f"The newest save is {newest}"] if newest else []])
            seen.append([page.get_by_text("no messages and no alerts").count() > 0, silenced])
            pairs = [(seen[0], seen[1]), *seen[2:]]
            return all(one == other for one, other in pairs)

        try:
            until(look_again, after, 60)
        except AssertionError as error:
            raise AssertionError(f"after {after}: {seen}") from error

    for step in (1, 2, 3):
        save(run, step, age=100 - step)
        daemon.known_good(step)
    agrees("three saves")
    save(run, 4, nan=True)
    agrees("poison", newest="bad")
    ckptguard("rollback", run)
    agrees("a rollback")
    assert "Step 4: bad, in quarantine" in page.evaluate(MARKS)
    page.locator(".events li", has_text="quarantine").get_by_role("link", name="step 4").wait_for()
    ckptguard("pin", run / "net-1.safetensors")
    agrees("a pin")
    ckptguard("unpin", run / "net-1.safetensors")
    agrees("an unpin")
    ckptguard("pin", run / "net-1.safetensors", "--until", "20s")
    agrees("a pin for a time")
    ckptguard("silence", run, "--until", "1h", "--reason", "work on the disk")
    agrees("a silence", silenced=True)
    ckptguard("silence", run, "--end")
    agrees("the end of a silence")
    save_like(run, 5, "model.w", bytes(4000))
    agrees("zeros", newest="suspect")
    ckptguard("clear", run, "5", "--reason", "they are meant")
    agrees("a clear")
    save_like(run, 6, "model.v", (run / "net-3.safetensors").read_bytes()[-4000:])
    agrees("another tensor", newest="suspect")
    ckptguard("accept", run, "6")
    agrees("an accept")
    flip(run / "net-6.safetensors")
    ckptguard("verify", run / "net-6.safetensors", codes=[3])
    agrees("damage", newest="bad")
    ckptguard("repair", run, "6")
    agrees("a repair")
    flip(run / "net-2.safetensors", new_times=True)
    agrees("changed bytes")
    ckptguard("reseal", run / "net-2.safetensors")
    agrees("a reseal")
    until(lambda: all(row[-1] == "no" for row in truth(run)[0]), "the end of the pin", 60)
    agrees("the end of a pin")
    ckptguard("prune", run, "--keep-last", "1")
    agrees("a prune")
    for step in (1, 2, 3):
        page.locator(".events li", has_text="pruned").get_by_role("link", name=f"step {step}").wait_for()
    page.get_by_role("button", name="Show", exact=False).first.click()
    assert page.locator(".events .tag", has_text="gone").count() == 0
    assert {f"Step {n}: good, in the trash" for n in (1, 2, 3)} < set(page.evaluate(MARKS))
    watched.may_be_away = True
    port = daemon.port
    daemon.kill()
    page.locator(".connection.lost").wait_for()
    save_like(run, 7, "model.v", (run / "net-6.safetensors").read_bytes()[-4000:])
    serve(run, port=port)
    page.locator(".connection.live").wait_for()
    agrees("a restart, and a save meanwhile")
    assert page.evaluate("window.stays")
