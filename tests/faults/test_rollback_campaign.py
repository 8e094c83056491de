"""Random faults in a training of one process: it ends finite, or with a clear RollbackExhausted, and never goes on
from a state that was not saved good. CKPTGUARD_CAMPAIGN=full: 200 faults."""

import contextlib
import math
import os
import random
import socket
from pathlib import Path

import pytest
import torch
from fixtures_runs import QUICK
from training_faults import SAVE_EVERY, TOTAL, FullDisk, Oracle, Struck, damage

import ckptguard
from ckptguard.errors import RollbackExhausted
from ckptguard.operations.verify_target import verify_target
from ckptguard.records.presence import DaemonRecord, this_host, write_daemon_record
from ckptguard.records.run import open_run
from ckptguard.training import guard as guard_module
from ckptguard.verdict import Outcome

KINDS = ("gradient", "weight", "buffer", "optimizer", "input", "spike", "scale", "floor", "lasting", "killed", "asked")
AROUND = ("calm", "damaged", "daemon_dead", "daemon_slow", "disk_full", "disk_full_later")
COUNT = 200 if os.environ.get("CKPTGUARD_CAMPAIGN") == "full" else 11
POLICY = ckptguard.RollbackPolicy(spikes=ckptguard.Spikes(window=8, warm_up=8, sigma=10, factor=50, in_a_row=2))


class Died(Exception):
    """The process was killed here."""


@pytest.fixture(autouse=True)
def one_thread():
    """For tensors this small, threads that wait for each other would be all the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("seed", range(COUNT))
def test_training_ends_finite_or_exhausted(tmp_path, monkeypatch, seed):
    """One fault and its circumstances, all drawn from the seed."""
    generator = random.Random(seed)
    kind, around = KINDS[seed % len(KINDS)], generator.choice(AROUND)
    at = generator.randrange(9, TOTAL) if kind == "spike" else generator.randrange(1, TOTAL + 1)
    options = {
        "check_every": generator.choice((1, 2, 50)),
        "blocking": generator.random() < 0.6,
        "policy": POLICY,
        "settings": QUICK,
        "daemon": "off",
    }
    tells = generator.random() < 0.7  # the loop tells its loss and norm
    run = tmp_path / "run"
    run.mkdir()
    disk = FullDisk(monkeypatch, run)
    told = f"seed {seed}: {kind} at {at}, {around}, {options['check_every']=}, {options['blocking']=}, {tells=}"
    print(told)
    exhausted = None
    with contextlib.ExitStack() as stack:
        if around.startswith("daemon"):
            options |= {"daemon": "auto", "deadline": 0.1}
            monkeypatch.setattr(guard_module, "ensure_daemon", lambda *_: None)
            stack.enter_context(a_daemon(run, tmp_path / "socket", listens=around == "daemon_slow"))
        training = Struck(seed, scaler=kind in ("scale", "floor"))
        try:
            oracle = train(run, training, generator, kind, around, at, disk, tells, options)
        except Died:
            disk.full = False
            struck = damage(run, generator, generator.randrange(3)) if around == "damaged" else []
            print(f"killed; damaged {struck}")
            training = Struck(seed + 1)
            again = train(run, training, generator, "calm", "calm", at, disk, tells, options)
            assert again.loads == 1 or not list(run.glob("step-*")) or at <= SAVE_EVERY, told
            oracle = again
        except RollbackExhausted as error:
            exhausted = error
    if exhausted is not None:
        assert kind == "lasting", told
        assert Path(exhausted.report).is_file(), told
        return
    assert oracle.wrong == [], told
    assert kind != "lasting", told
    assert training.finite(), told
    report = verify_target(str(run), QUICK, newest=1)
    assert report.outcome is Outcome.GOOD, told
    assert report.checkpoints[0].step == TOTAL, told


_ORACLES = {}


def train(run, training, generator, kind, around, at, disk, tells, options):
    """Train to the end; the oracle that watched."""
    hit = generator.randrange(1, 4) if kind == "scale" else 1
    guard = ckptguard.TrainingGuard(run, **training.parts(), **options)
    oracle = Oracle(training, guard._progress)
    if run in _ORACLES:
        oracle.take_over(_ORACLES[run])
    _ORACLES[run] = oracle
    struck = 0
    try:
        for step, (x,) in guard.steps(training.loader, total=TOTAL, save_every=SAVE_EVERY):
            now = training.made + 1
            if around == "disk_full":
                disk.full = max(2, at - 6) <= now <= at - 2  # the first save was made
            elif around == "disk_full_later":
                disk.full = now in (at + 1, at + 2)
            strikes = now >= at if kind in ("lasting", "scale", "floor") else now == at
            fault = {"lasting": "gradient", "floor": "scale"}.get(kind, kind)
            if kind in ("scale", "floor") and struck >= (5 * hit if kind == "scale" else 9):
                strikes = False
            struck += strikes
            if strikes and around == "damaged" and kind != "killed":
                guard._saving.drain(10.0)
                print(damage(run, generator, generator.randrange(1, 4)))
            if strikes and kind == "killed":
                if generator.random() < 0.5:
                    training.update(x, "weight")
                raise Died
            if strikes and kind == "asked":
                guard.rollback("asked")
                strikes = False
            loss, norm = training.update(x, fault if strikes else None)
            if strikes and kind == "floor" and training.scaler.scale <= 256:
                error = Exception("Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.")
                assert guard.observe(error=error).sick
                struck = 9
            elif tells or kind in ("spike", "scale"):
                guard.observe(loss=loss, grad_norm=norm)
            assert step <= TOTAL
    finally:
        disk.full = False
        if kind != "killed":
            guard.close()
    return oracle


@contextlib.contextmanager
def a_daemon(run, place, *, listens):
    """A daemon that died and left its address behind, or one that takes a connection and never answers."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(place))
    if listens:
        server.listen()
    else:
        server.close()
    host, boot = this_host()
    record = DaemonRecord(address=str(place), host=host, boot_id=boot, pid=1, started_at="2026-01-01T00:00:00Z")
    write_daemon_record(open_run(str(run)), record)
    with contextlib.closing(server):
        yield


def test_the_oracle_sees_a_wrong_load(tmp_path):
    """A campaign that could not fail would prove nothing: a state that was never saved is noticed."""
    training = Struck(1)
    guard = ckptguard.TrainingGuard(tmp_path / "run", **training.parts(), daemon="off", settings=QUICK)
    oracle = Oracle(training, guard._progress)
    guard.save(step=1)
    guard._progress.arrive(1, {})
    assert oracle.wrong != []
    training.model[0].weight.data.fill_(math.nan)
    guard._progress.arrive(0, {})
    assert "not finite" in oracle.wrong[-1]
