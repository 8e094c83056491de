"""Random faults in a training of one process: it ends finite, or with a clear RollbackExhausted, and never goes on
from a state that was not saved good and GOOD at that moment. CKPTGUARD_CAMPAIGN=full: 240 faults."""

import contextlib
import dataclasses
import math
import os
import random
from pathlib import Path

import daemon_faults
import pytest
from support.runs import QUICK
from support.training_faults import SAVE_EVERY, TOTAL, FullDisk, HeldSave, Oracle, Struck, damage

import ckptguard
from ckptguard.errors import RollbackExhausted
from ckptguard.records.pins import list_pins
from ckptguard.records.run import open_run
from ckptguard.runs.history import load_history
from ckptguard.training import client
from ckptguard.values.ids import CheckpointId
from ckptguard.values.verdict import Outcome
from ckptguard.verification.target import Selection, verify_target

KINDS = (
    *("gradient", "weight", "buffer", "optimizer", "input", "spike", "scale", "floor", "lasting", "killed", "asked"),
    "in_flight",  # one of these while a save is in flight
)
AROUND = ("calm", "damaged", "disk_full", "disk_full_later")
FULL = os.environ.get("CKPTGUARD_CAMPAIGN") == "full"
COUNT = 240 if FULL else len(KINDS)
POLICY = ckptguard.RollbackPolicy(spikes=ckptguard.Spikes(window=8, warm_up=8, sigma=10, factor=50, in_a_row=2))


class Died(Exception):
    """The process was killed here."""


# A thread that ends as in a killed process says so by SystemExit, which a late look of pytest's takes for a failure.
@pytest.mark.campaign
@pytest.mark.filterwarnings("ignore:Exception in thread ckptguard-save:pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("seed", range(COUNT))
def test_training_ends_finite_or_exhausted(tmp_path, monkeypatch, seed):
    """One fault and its circumstances, all drawn from the seed."""
    generator = random.Random(seed)
    kind, around = KINDS[seed % len(KINDS)], generator.choice(AROUND)
    at = generator.randrange(9, TOTAL) if kind == "spike" else generator.randrange(1, TOTAL + 1)
    options = {
        "policy": dataclasses.replace(POLICY, check_every=generator.choice((1, 2, 50))),
        "saving": ckptguard.Saving(blocking=generator.random() < 0.6),
        "settings": QUICK,
        "daemon": "off",
    }
    tells = generator.random() < 0.7  # the loop tells its loss and norm
    daemons = (None, *daemon_faults.KINDS)
    asked = generator.choice(daemons) if FULL else {2: "dead", 1: "slow", 11: "restarting"}.get(seed)
    if asked is not None:
        options |= {"daemon": "auto", "deadlines": ckptguard.Deadlines(daemon=0.1)}
        monkeypatch.setattr(client, "ensure_daemon", lambda *_: None)
    run = tmp_path / "run"
    run.mkdir()
    struck = Strikes(kind, around, at, generator, FullDisk(monkeypatch, run), HeldSave(monkeypatch), run, tells)
    if kind == "in_flight":
        struck.have_in_flight(options)
    elif generator.random() < 0.25:
        struck.own_files, options["saving"] = True, ckptguard.Saving()
    told = f"seed {seed}: {struck.kind} at {struck.at}, {around}, {asked=}, {struck.held=}, {struck.own_files=}, "
    told += f"{tells=}, {options}"
    print(told)
    exhausted = None
    with contextlib.ExitStack() as stack:
        if asked is not None:
            struck.daemon = stack.enter_context(daemon_faults.a_daemon(asked, run, random.Random(seed)))
        training = Struck(seed, scaler=kind in ("scale", "floor"))
        try:
            oracle = struck.train(training, options)
        except Died:
            struck.disk.full = False
            damaged = damage(run, generator, generator.randrange(3)) if around == "damaged" else []
            print(f"killed; damaged {damaged}")
            training, before = Struck(seed + 1), oracle_of(run)
            struck.kind = struck.around = "calm"
            oracle = struck.train(training, options, before)
            assert oracle.loads == 1 or not list(run.glob("step-*")) or at <= SAVE_EVERY, told
        except RollbackExhausted as error:
            exhausted = error
    assert list_pins(open_run(str(run))) == [], told
    if exhausted is not None:
        assert kind == "lasting", told
        assert Path(exhausted.report).is_file(), told
        return
    assert oracle.wrong == [], told
    assert kind != "lasting", told
    assert training.finite(), told
    report = verify_target(str(run), QUICK, Selection(newest=1))
    assert report.outcome is Outcome.GOOD, told
    assert report.checkpoints[0].step == TOTAL or struck.full_at_end, told


_ORACLES = {}


def oracle_of(run):
    """The oracle that watched this run last."""
    return _ORACLES.get(run)


class Strikes:
    """What happens to one training, and when."""

    def __init__(self, kind, around, at, generator, disk, save, run, tells) -> None:
        self.kind, self.around, self.at, self.generator, self.disk, self.save = kind, around, at, generator, disk, save
        self.run, self.tells, self.daemon, self.held, self._struck = run, tells, None, None, 0
        self.own_files = False
        self._hit = generator.randrange(1, 4) if kind == "scale" else 1

    def have_in_flight(self, options):
        """Have the fault come in the update after a save, which stops before its first byte or before its manifest:
        until the rollback waits for it, or until after that gave it up."""
        self.kind = self.generator.choice(("gradient", "weight", "buffer", "optimizer", "asked", "killed"))
        self.at = SAVE_EVERY * self.generator.randrange(1, (TOTAL - 1) // SAVE_EVERY + 1) + 1
        self.held = (self.generator.choice(("write", "seal")), self.generator.choice(("waited for", "given up")))
        options |= {
            "saving": ckptguard.Saving(blocking=False),
            "policy": dataclasses.replace(POLICY, check_every=1),
            "deadlines": ckptguard.Deadlines(daemon=10.0 if self.held[1] == "waited for" else 0.1),
        }
        self._late = self.at + self.generator.randrange(2, 6)

    def train(self, training, options, before=None):
        """Train to the end; the oracle that watched."""
        files = {"save": training.save, "load": training.load} if self.own_files else {}
        guard = ckptguard.TrainingGuard(self.run, **training.parts(), **options, **files)
        oracle = _ORACLES[self.run] = Oracle(training, guard, lambda: self.disk.full)
        if before is not None:
            oracle.take_over(before)
        if self.held is not None and before is None and self.held[1] == "waited for":
            self._let_go_when_waited_for(guard._saving)
        try:
            for step, (x,) in guard.steps(training.loader, total=TOTAL, save_every=SAVE_EVERY):
                now = training.made + 1
                if before is None:
                    self._before(now)
                strikes = self._strikes(now)
                if strikes:
                    self._surround(guard)
                if strikes and self.kind == "killed":
                    if self.generator.random() < 0.5:
                        training.update(x, "weight")
                    self.save.let_go(killed=True)
                    raise Died
                if strikes and self.kind == "asked":
                    guard.rollback("asked")
                    strikes = False
                fault = {"lasting": "gradient", "floor": "scale"}.get(self.kind, self.kind)
                loss, norm = training.update(x, fault if strikes else None)
                self._tell(guard, training, loss, norm, at_floor=strikes and self.kind == "floor")
                assert step <= TOTAL
        finally:
            self.full_at_end, self.disk.full = self.disk.full, False
            self.save.let_go()
            if self.kind != "killed":
                guard.close()
        return oracle

    def _before(self, now):
        if self.around == "disk_full":
            self.disk.full = max(2, self.at - 6) <= now <= self.at - 2  # the first save was made
        elif self.around == "disk_full_later":
            self.disk.full = now in (self.at + 1, self.at + 2)
        if self.held is not None and now == self.at - 1:
            self.save.arm(self.held[0])
        if self.held is not None and now == self._late:
            self.save.let_go()

    def _strikes(self, now):
        strikes = now >= self.at if self.kind in ("lasting", "scale", "floor") else now == self.at
        if self.kind in ("scale", "floor") and self._struck >= (5 * self._hit if self.kind == "scale" else 9):
            strikes = False
        self._struck += strikes
        return strikes

    def _surround(self, guard):
        if self.daemon is not None and self._struck == 1:
            self.daemon.strike()
        if self.held is not None and not self.disk.full:
            assert self.save.reached.wait(60)
        if self.around == "damaged" and self.kind != "killed":
            if self.held is None:
                guard._saving.drain(10.0)
            print(damage(self.run, self.generator, self.generator.randrange(1, 4)))

    def _tell(self, guard, training, loss, norm, *, at_floor):
        if at_floor and training.scaler.scale <= 256:
            error = Exception("Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.")
            assert guard.observe(error=error).sick
            self._struck = 9
        elif self.tells or self.kind in ("spike", "scale"):
            guard.observe(loss=loss, grad_norm=norm)

    def _let_go_when_waited_for(self, saving):
        drain = saving.drain

        def draining(seconds=None):
            if seconds is not None:
                self.save.let_go()
            drain(seconds)

        saving.drain = draining


def test_the_oracle_sees_a_wrong_load(tmp_path):
    """A campaign that could not fail would prove nothing: a state that was never saved is noticed."""
    training = Struck(1)
    guard = ckptguard.TrainingGuard(tmp_path / "run", **training.parts(), daemon="off", settings=QUICK)
    oracle = Oracle(training, guard)
    path = guard.save(step=1)
    guard._progress.arrive(1, {})
    assert oracle.wrong != []
    training.model[0].weight.data.fill_(math.nan)
    guard._progress.arrive(0, {})
    assert "not finite" in oracle.wrong[-1]
    (manifest,) = [load_history(open_run(guard.run)).manifest(CheckpointId("step-#", 1, 1))]
    assert manifest.path == Path(path).name
    guard._store.read(manifest)
    assert oracle.wrong[-1] == "step-000000001 is loaded, and it is None"
