"""Every trainer of the table, as people run it: what must hold of any. A new one is a script and a row."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from support.daemon_process import until
from support.faults import flip
from support.trainers import Trainer, Training, contents, md5_of

from ckptguard.records.incidents import list_incidents
from ckptguard.runs.history import load_history
from ckptguard.values.verdict import Outcome

pytestmark = [pytest.mark.trainers, pytest.mark.torch, pytest.mark.timeout(600)]
FULL = os.environ.get("CKPTGUARD_CAMPAIGN") == "full"

TRAINERS = (
    # One file or folder a save, a name that is saved over, pointers.
    Trainer("nanogpt", ("ckpt.pt",), always=True),
    Trainer("fairseq", ("checkpoint_last.pt",), always=True),
    Trainer("mmengine", ("epoch_*.pth",), named=True, always=True),
    Trainer("detectron2", ("model_0*.pth", "model_final.pth"), named=True),
    Trainer("dino", ("checkpoint.pth",)),
    Trainer("gpt_neox", ("global_step*/*_states.pt",), named=True),
    Trainer("lightning_last", ("last.ckpt",), needs=("lightning",)),
    Trainer("litgpt_pretrain", ("step-*/lit_model.pth",), needs=("litgpt",), named=True),
    Trainer("open_clip_train_main", ("epoch_latest.pt",), needs=("open_clip_train",), run="logs/exp/checkpoints"),
    Trainer("speechbrain_brain", ("CKPT*/net.ckpt", "CKPT*/optimizer.ckpt"), needs=("speechbrain",)),
    Trainer("timm_train", ("last.pth.tar",), needs=("timm",)),
    Trainer("ultralytics_classify", ("last.pt",), needs=("ultralytics",), run="runs/exp/weights"),
    Trainer("ignite_checkpoint", ("checkpoint_8.pt",), needs=("ignite",)),
    Trainer("monai_saver", ("checkpoint_epoch=4.pt",), needs=("ignite", "monai")),
    Trainer("sb3", ("rl_model_80_steps.zip",), needs=("stable_baselines3", "gymnasium"), named=True, forgets=True),
    Trainer("keras_checkpoint", ("epoch-04.weights.h5",), needs=("keras",), named=True, forgets=True),
    Trainer("keras_whole", ("epoch-04.keras",), needs=("keras",), named=True, forgets=True),
    # Several files a save.
    Trainer(
        "torchtune",
        ("epoch_3/model-00001-of-00001.bin", "recipe_state/recipe_state.pt"),
        weights=("epoch_*",),
        parts=("model", "optimizer"),
        keep=3,
    ),
    Trainer("dinov2", ("model_0000399.rank_?.pth",), named=True),
    Trainer("composer", ("ep4-ba40-rank?.pt",), parts=("rank0", "rank1"), named=True, keep=3),
    Trainer("hifi_gan", ("g_00000400", "do_00000400"), parts=("g", "do"), keep=3),
    Trainer("vits", ("G_400.pth", "D_400.pth"), parts=("G", "D"), keep=2),
    Trainer("cyclegan", ("latest_net_?.pth",), parts=("G", "D")),
    Trainer(
        "basicsr",
        ("models/net_?_400.pth", "training_states/400.state"),
        weights=("models/net_?_*.pth",),
        parts=("net_g", "net_d", "state"),
        keep=3,
    ),
    Trainer(
        "guided_diffusion",
        ("model000040.pt", "ema_0.9999_000040.pt", "opt000040.pt"),
        weights=("model*.pt", "ema*.pt"),
        parts=("model", "ema", "opt"),
        keep=3,
        forgets=True,
    ),
)


@pytest.fixture(
    scope="module",
    params=[pytest.param(row, id=row.script, marks=pytest.mark.xdist_group(row.script)) for row in TRAINERS],
)
def trainer(request) -> Trainer:
    """A trainer of the table."""
    request.param.skip_unless_there()
    return request.param


def test_all_saves_are_found_in_order_and_good(trained):
    """Beside a daemon: each save of each path has one verdict, GOOD, in the order of saving, and no alarm; and each
    file of each save was read for it."""
    history = load_history(trained.opened)
    saved: defaultdict[str, list[str]] = defaultdict(list)
    found: defaultdict[str, list[str]] = defaultdict(list)
    times, read = {}, set()
    for series in history.names:
        current_verdicts = sorted(
            history.current_verdicts(series).values(), key=lambda current_verdict: current_verdict.id.order
        )
        for current_verdict in current_verdicts:
            manifest = history.manifest(current_verdict.id)
            assert manifest is not None
            assert current_verdict.outcome is Outcome.GOOD, (manifest.path, history.verdict(current_verdict.id))
            found[series].append(manifest.path)
            times[manifest.path] = series
            read |= {file.md5 for file in manifest.files}
    for line in trained.told("saved"):
        for path in line.paths:
            saved[times.get(path, path)].append(path)
    assert found == saved
    assert [(n.counter, file) for n in trained.told("saved") for file, md5 in n.files.items() if md5 not in read] == []
    assert list_incidents(trained.opened) == []


def test_the_known_good_one_is_what_was_saved_last(trained, tmp_path):
    """Nothing is wrong: known-good is a save of the last time that it saved, and never an optimizer alone; a rollback
    changes nothing."""
    training = trained.copied(tmp_path / "copy")
    training.ask("verify")
    path = Path(training.ask("known-good")["path"]).relative_to(training.run)
    last = [line for line in training.told("saved") if line.counter == training.trainer.saves]
    assert path.as_posix() in {name for line in last for name in line.paths}
    assert not training.trainer.weights or any(path.match(pattern) for pattern in training.trainer.weights), path
    before = contents(training.run)
    training.ask("rollback", "--force")
    assert contents(training.run) == before


def test_poisoned_under_supervision_it_ends_finite_and_never_begins_again(training):
    """The saves turn NaN: that is noticed, it goes back, resumes from what was good, and ends well."""
    last, poison = training.trainer.saves, training.trainer.saves - 1
    said = training.under_supervision(last=last, poison=poison)
    starts, saves = training.told("started"), training.told("saved")
    assert [start.counter for start in starts] == [0, poison - 1], said
    assert starts[-1].finite
    good = [line for line in saves if line.counter == poison - 1]
    assert starts[-1].sum in {line.sum for line in good}
    assert saves[-1].counter == last
    assert saves[-1].finite
    incidents = [i for i in list_incidents(training.opened) if i.cause == "numeric"]
    assert [(i.source, i.state) for i in incidents] == [("supervise", "closed")], said
    training.train(last=last + 1, waits=0)  # its own resume finds what was saved last
    start = training.told("started")[-1]
    assert (start.counter, start.sum) == (last, saves[-1].sum)


def test_begun_from_scratch_the_newest_good_save_stands(training):
    """Nobody names what to resume from after it went back: it ends with 12, and every file of the newest good save has
    its bytes, so that a user who names it goes on from there."""
    if not training.trainer.forgets:
        pytest.skip("it finds by itself what to resume from")
    last, poison = training.trainer.saves, training.trainer.saves - 1
    said = training.under_supervision(last=last, poison=poison, code=12, scratch=1)
    assert [start.counter for start in training.told("started")] == [0, 0], said
    saves = training.told("saved")
    good = saves[poison - 2]
    assert (good.counter, good.finite) == (poison - 1, True)
    assert {name: md5_of(training.run / name) for name in good.files} == good.files, said
    training.train(last=last, waits=0)
    start = training.told("started")[-1]
    assert (start.counter, start.sum) == (good.counter, good.sum), said


@pytest.mark.parametrize("parts", ["first, then second", "last"])
def test_parts_turn_nan_one_after_the_other(trained, tmp_path, parts):
    """Only a part of each save is NaN: a rollback gives its own resume one finite moment, the newest that exists."""
    training = trained.copied(tmp_path / "copy")
    names, turn = training.trainer.parts, training.trainer.saves + 1
    if parts == "last" and len(names) < 2:
        pytest.skip("it has no parts")  # the other case is the same
    poison = f"{turn}" if not names else f"{names[0]}={turn},{names[1]}={turn + 1}"
    daemon = training.daemon()
    try:
        training.train(last=turn + 1, poison=f"{names[-1]}={turn}" if parts == "last" else poison)
        assert daemon.stop() == 0
    finally:
        daemon.kill()
    wanted = training.newest_whole()
    training.ask("rollback")
    assert wanted > 0
    training.resume(at_least=wanted)


@pytest.mark.parametrize("write", ["first", "last"])
def test_killed_in_a_save(trained, tmp_path, write):
    """It dies while it writes a file: once nothing changes any more a rollback works, and its own resume finds
    the save before."""
    training = trained.copied(tmp_path / "copy")
    saves, writes, settle = training.trainer.saves, training.told("saved")[-1].writes, 0.1
    if write == "last" and writes < 2:
        pytest.skip("it writes once a save")  # the other case is the same
    training.train_until_killed(last=saves + 1, write=1 if write == "first" else writes)
    wanted = training.newest_whole()
    until(lambda: training.unchanged_for() > 2 * settle, "twice settle without a change")
    training.ask("rollback", settle=settle)
    assert wanted > 0
    training.resume(at_least=wanted)


def test_a_flipped_bit_is_named(trained, tmp_path):
    """In each file that its own resume reads: BAD, and the file is named."""
    training = trained.copied(tmp_path / "copy")
    training.ask("verify")
    assert training.files()
    for path in training.files():
        flip(path)
        bad = [c for c in training.ask("verify", code=3)["checkpoints"] if c["outcome"] == "bad"]
        own = path.relative_to(training.run).as_posix()
        named = {f["file"] for c in bad for f in c["findings"]}
        assert own in named or any(own == c["path"] or own.startswith(f"{c['path']}/") for c in bad), (own, bad)
        assert own in named or any(f["tensor"] for c in bad for f in c["findings"]), (own, bad)
        flip(path)
        training.ask("verify")


@pytest.mark.parametrize("which", ["all", "first", "last"])
def test_after_a_rollback_its_own_resume_loads_what_was_good(trained, tmp_path, which):
    """All that it would resume from is damaged, or one file of it: a rollback gives it what was good, under its names,
    all of one save."""
    training = trained.copied(tmp_path / "copy")
    files = training.files()
    if which == "last" and len(files) < 2:
        pytest.skip("it reads one file")  # the other cases are the same
    for path in {"all": files, "first": files[:1], "last": files[-1:]}[which]:
        flip(path)
    training.ask("verify", code=3)
    wanted = training.newest_whole()
    training.ask("rollback", "--force")
    assert wanted > 0
    training.resume(at_least=wanted)


def test_its_own_resume_loads_what_is_restored(trained, tmp_path):
    """Elsewhere: it trains on from there, from all parts of what was saved last."""
    other = Training(trained.trainer, tmp_path / "other")
    other.folder.mkdir()
    given = trained.ask("restore", "--to", other.run)
    shutil.copy(f"{trained.run}.log", f"{other.run}.log")
    other.resume(at_least=1, **({"from": given["path"]} if trained.trainer.named else {}))


@pytest.mark.campaign
@pytest.mark.skipif(not FULL, reason="it takes long: CKPTGUARD_CAMPAIGN=full")
@pytest.mark.parametrize("is_supervised", [False, True], ids=["daemon", "supervise"])
def test_a_save_every_two_seconds_beside_two_busy_processes(training, is_supervised):
    """On the settings that a user has: what turned NaN is noticed, and its own resume finds one finite moment."""
    last, poison = 12, 9
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        more = {"poison": poison, "waits": 0, "every": 2}
        if is_supervised:
            command = [sys.executable, "-m", "ckptguard", "supervise", str(training.run), "--", *training.argv]
            training.to_its_end(command, training.environment(last=last, is_stopped=1, **more))
            assert training.told("saved")[-1].finite
        else:
            training.run.mkdir(parents=True, exist_ok=True)
            daemon = training.daemon(CKPTGUARD_SETTLE="5", CKPTGUARD_SCAN_INTERVAL="30")  # the defaults
            try:
                training.train(last=last, **more)
                assert daemon.stop() == 0
            finally:
                daemon.kill()
    finally:
        for one in busy:
            one.kill()
            one.wait()
    wanted = training.newest_whole()
    training.ask("rollback")
    assert wanted > 0
    training.resume(at_least=wanted)
