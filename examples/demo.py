"""The whole job on real training: watch, verify, notice, go back, go on.

A small character transformer learns the standard library's own sources on the CPU, and saves with its own torch.save.
A real ckptguard-daemon guards the run. Then one save is damaged on disk, and a careless switch to fp16 blows the
weights up. Nothing here assigns a NaN, and nothing here knows in advance which checkpoint will be good.

    python examples/demo.py [--run FOLDER] [--every STEPS]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

# Threads that spin while they wait would starve the daemon, with which we share two cores. Read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from char_transformer import CharTransformer, draw_batch, read_corpus, train_step
from daemon_client import ask
from timeline import print_timeline

from ckptguard.records.incidents import list_incidents, update_incident
from ckptguard.records.run import open_run

MARK = ".ckptguard-demo"
HEALTHY_SAVES = 4  # saves before the careless switch
SAVES = 8  # saves until the demo is done
CAREFUL_SCALE = 2.0**12  # the loss scale with which fp16 starts; it then doubles with every step, unwatched
RATE = 3e-3


class Training:
    """Model, optimizer and step, with this demo's own save and load: one torch.save file for each save."""

    def __init__(self, run: Path) -> None:
        torch.manual_seed(0)
        self.run = run
        self.model = CharTransformer()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE)
        self.corpus = read_corpus()
        self.step = 0
        self.losses: list[float] = []

    def advance(self, loss_scale: float | None = None) -> tuple[float, float]:
        """One step; returns its loss and gradient norm."""
        self.step += 1
        loss, norm = train_step(self.model, self.optimizer, draw_batch(self.corpus, self.step), loss_scale)
        self.losses.append(loss)
        return loss, norm

    def save(self) -> Path:
        """Save as most loops do: straight under the final name."""
        path = self.run / f"char-{self.step:04d}.pt"
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}
        torch.save(state, path)
        return path

    def load(self, path: Path) -> None:
        """Put model, optimizer and step back."""
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]

    def recent_loss(self, steps: int) -> float:
        """The mean loss of the last steps."""
        return sum(self.losses[-steps:]) / steps


def tell(text: str) -> None:
    """One line of the story."""
    print(text, flush=True)


def prepare(run: Path) -> None:
    """Start from an empty folder; only one that an earlier demo made is ever emptied."""
    if run.is_dir() and any(run.iterdir()):
        if not (run / MARK).is_file():
            sys.exit(f"{run} is not empty and no earlier demo made it: name another folder with --run")
        shutil.rmtree(run)
    run.mkdir(parents=True, exist_ok=True)
    (run / MARK).write_text("made by examples/demo.py, which may delete this folder\n")


@contextlib.contextmanager
def guarded(run: Path) -> Iterator[str]:
    """A real daemon, as a process of its own, on this run; yields the address of its socket."""
    command = [sys.executable, "-m", "ckptguard_daemon", str(run), "--log-file", str(run / "daemon.log")]
    quick = {**os.environ, "CKPTGUARD_SETTLE": "0.3", "CKPTGUARD_SCAN_INTERVAL": "2"}
    with subprocess.Popen(command, env=quick) as daemon:
        try:
            record = run / "_ckptguard" / "daemon.json"
            deadline = time.monotonic() + 60
            while not record.is_file():
                if daemon.poll() is not None or time.monotonic() > deadline:
                    sys.exit(f"the daemon did not start: see {run / 'daemon.log'}")
                time.sleep(0.05)
            yield json.loads(record.read_text())["address"]
        finally:
            daemon.terminate()


def flip_one_bit(path: Path) -> int:
    """What a failing disk does: one bit of a tensor changes, and neither size nor times tell. Returns the place."""
    before = path.stat()
    place = before.st_size // 2 // 4 * 4
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 0b100]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    return place


def train_healthily(training: Training, until: int, every: int) -> None:
    """Plain fp32 training with a save every so many steps."""
    while training.step < until:
        training.advance()
        if training.step % every == 0:
            path = training.save()
            tell(f"  step {training.step:4d}  loss {training.recent_loss(every):.3f}  saved {path.name}")


def train_carelessly(training: Training, every: int) -> tuple[float, float, int]:
    """fp16 with a loss scale that grows and grows, looked at only after the next save. Returns what is seen then,
    and when the gradients first overflowed."""
    overflow = 0
    start = training.step
    loss = norm = 0.0
    while training.step < start + every:
        loss, norm = training.advance(loss_scale=CAREFUL_SCALE * 2.0 ** min(training.step - start, 60))
        if not overflow and not math.isfinite(norm):
            overflow = training.step
    path = training.save()
    tell(f"  step {training.step:4d}  loss {loss}  saved {path.name}")
    return loss, norm, overflow


def roll_back(run: Path) -> Path:
    """The one line: quarantine what is newer than known-good, read the known-good, and say where it is."""
    command = [sys.executable, "-m", "ckptguard", "rollback", str(run), "--force", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    answer = json.loads(done.stdout)
    for path in answer["quarantined"]:
        tell(f"  quarantined {path}")
    return Path(answer["known_good"]["path"])


def note_rollback(run: Path, path: Path) -> None:
    """Write into the incident's record what was done about it."""
    opened = open_run(str(run))
    for incident in list_incidents(opened):
        if incident.state == "open":
            update_incident(opened, incident, state="closed", action=f"went back to {path.name}", known_good=str(path))


def live_through(run: Path, every: int) -> dict[str, object]:
    """The story; returns its facts."""
    with guarded(run) as address:
        tell(f"A daemon guards {run}; it answers at {address}")
        training = Training(run)
        tell("Healthy training:")
        train_healthily(training, HEALTHY_SAVES * every, every)
        loss_before = training.recent_loss(every)
        newest = run / f"char-{training.step:04d}.pt"
        answer = ask(address, run, "known-good", wait_seconds=60)
        tell(f"The daemon's known-good is {Path(str(answer['path'])).name}. Then the disk flips one bit of it:")
        place = flip_one_bit(newest)
        torch.load(newest, weights_only=True)
        tell(f"  byte {place} of {newest.name} changed, and torch.load still loads it without a word")

        tell("A careless switch to fp16, with a loss scale that nobody watches:")
        loss, norm, overflow = train_carelessly(training, every)
        assert not math.isfinite(loss), "the blow-up did not happen"
        sick = training.step
        tell(f"  SICK at step {sick}: loss {loss}, gradient norm {norm}; the gradients overflowed at step {overflow}")
        known = {"framework": "plain", "autocast": "float16", "first_overflow": overflow}
        evidence = {"loss": str(loss), "grad_norm": str(norm), **known}
        report = {"step": sick, "cause": "numeric", "reason": "the loss is not finite", "evidence": evidence}
        ask(address, run, "incidents", body=report)
        answer = ask(address, run, "known-good", wait_seconds=60)
        tell(f"Asked, the daemon says: {Path(str(answer['path'])).name} is known-good ({answer['reason']})")
        tell("Going back, which reads it first:")
        path = roll_back(run)
        training.load(path)
        back = training.step
        if path.name == newest.name:
            tell(f"  {newest.name} is damaged, but its kept copy is whole: it was put back")
        tell(f"  went back to {path.name}, step {back}, and on in fp32:")
        note_rollback(run, path)

        train_healthily(training, SAVES * every, every)
        loss_after = training.recent_loss(every)
        ask(address, run, "known-good", wait_seconds=60)
    return {
        "damaged": newest.name,
        "sick_step": sick,
        "first_overflow": overflow,
        "went_back_to": path.name,
        "loss_before": loss_before,
        "loss_after": loss_after,
    }


def main() -> None:
    """Run the demo and print how to look around."""
    parser = argparse.ArgumentParser(description="ckptguard's whole job on real training, in about half a minute")
    parser.add_argument("--run", type=Path, default=Path("demo-run"), help="where to train (default: %(default)s)")
    parser.add_argument("--every", type=int, default=50, help="steps between saves (default: %(default)s)")
    options = parser.parse_args()
    if options.every < 16:
        parser.error("--every must be at least 16, or fp16 has no time to overflow")
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    started = time.monotonic()
    run = options.run.absolute()
    prepare(run)
    facts = live_through(run, options.every)
    print_timeline(run)
    before, after = facts["loss_before"], facts["loss_after"]
    tell(f"\nLoss {before:.3f} before the incident, {after:.3f} now. {time.monotonic() - started:.0f} seconds in all.")
    (run / "story.json").write_text(json.dumps(facts, indent=2) + "\n")
    shown = os.path.relpath(run)
    beside = Path(sys.executable).with_name("ckptguard")
    command = os.path.relpath(beside) if beside.is_file() else "ckptguard"
    tell("\nLook around:")
    for line in (f"list {shown}", f"status {shown}", f"verify {shown}", f"show {shown}/{facts['went_back_to']}"):
        tell(f"  {command} {line}")
    tell(f"  {command} restore {shown} --to restored")


if __name__ == "__main__":
    main()
