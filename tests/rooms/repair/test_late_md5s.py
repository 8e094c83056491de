"""Every good save gets its MD5 on record: in the reading of a scrub, once, and only if its bytes are as sealed."""

from __future__ import annotations

import hashlib
import json
import math
import random
import shutil
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
from ckptguard_daemon.metrics import exposition
from support.faults import flip
from support.runs import QUICK
from support.tiny_run import inline
from support.views import look

from ckptguard.inspect.status import status
from ckptguard.records.after_seal import late_md5_ids, read_late_md5s
from ckptguard.records.run import Run, open_run
from ckptguard.repair import scrub as scrub_module
from ckptguard.repair.scrub import ScrubOrder, scrub
from ckptguard.runs.work import Work
from ckptguard.scan.reread import ReadingStopped
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome
from ckptguard.verification import checkpoint as checkpoint_module

LATE = ScrubOrder(max_age=math.inf, late_md5s=True)  # what a daemon reads where its scrub is off
SIZES = (64, 700, 70_000, 1_100_000)  # numbers in a tensor; the last take more than one block


def write(run: Path, step: int, chance: random.Random, sizes: tuple[int, ...] = (700, 70_000)) -> Path:
    """One save of some format, with tensors of these sizes."""
    state = {f"layer{n}.weight": torch.randn(size) for n, size in enumerate(sizes)}
    kind = chance.choice(("torch", "safetensors", "sharded"))
    if kind == "torch":
        torch.save({"model": state, "step": step}, run / f"net-{step}.pt")
        return run / f"net-{step}.pt"
    if kind == "safetensors":
        safetensors.torch.save_file(state, run / f"flat-{step}.safetensors")
        return run / f"flat-{step}.safetensors"
    folder = run / f"sharded-{step}"
    folder.mkdir()
    shards = {name: f"model-{n + 1:05d}-of-{len(state):05d}.safetensors" for n, name in enumerate(state)}
    for name, shard in shards.items():
        safetensors.torch.save_file({name: state[name]}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    return folder


def md5s_of(run: Path, save: Path) -> dict[str, str]:
    """What hashlib says of the files of a save, by path in the run."""
    found = sorted(save.rglob("*")) if save.is_dir() else [save]
    return {str(p.relative_to(run)): hashlib.md5(p.read_bytes()).hexdigest() for p in found}


def counts(run: Run, settings: Settings) -> tuple[int, float]:
    """How many are without, by `status` and by the metric."""
    summary = status(look(run, settings)).summary
    [line] = [
        line
        for line in exposition([summary], None, time.time()).decode().splitlines()
        if line.startswith("ckptguard_without_md5_checkpoints")
    ]
    return summary.without_md5, float(line.split()[-1])


def verified(root: Path, settings: Settings) -> Run:
    """The run after a pass beside training, which leaves out MD5 of what is large: here of everything."""
    run = open_run(str(root))
    reconcile(look(run, settings), PassNotes(), work=Work(scanner=inline, yield_for=0.0), assume_quiet=True)
    return run


@pytest.fixture(autouse=True)
def all_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny ones count as large."""
    monkeypatch.setattr(checkpoint_module, "LARGE", 0)


@pytest.mark.parametrize("seed", range(24))
def test_each_good_save_gets_the_right_one_once(root: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its format and size, wherever the reading is stopped and begun by a new process, and whatever is damaged
    or goes away meanwhile. What is damaged is BAD, and gets none."""
    chance = random.Random(seed)
    root.mkdir(exist_ok=True)
    settings = QUICK.changed(keep="none")
    sizes = tuple(chance.choice(SIZES) for _ in range(chance.randint(1, 3)))
    saves = [write(root, step, chance, sizes) for step in range(1, chance.randint(3, 6))]
    expected = {save.name: md5s_of(root, save) for save in saves}
    run = verified(root, settings)
    assert counts(run, settings) == (len(saves), len(saves))

    damaged = {save.name for save in saves if chance.random() < 0.25}
    for save in saves:
        if save.name in damaged:
            flip(chance.choice(sorted(save.rglob("*.safetensors"))) if save.is_dir() else save, -9)
    goes = chance.choice(saves) if chance.random() < 0.5 else None

    taken: list[str] = []
    order: list[str] = []
    real = scrub_module.record_late_md5s

    def record(run: Run, id: object, md5s: dict[str, str]) -> None:
        taken.extend(md5s)
        real(run, id, md5s)

    monkeypatch.setattr(scrub_module, "record_late_md5s", record)
    for _ in range(200):
        left = chance.randint(6, 30)

        def hold() -> None:
            nonlocal left
            left -= 1
            if goes is not None and left == 3 and goes.exists():
                shutil.rmtree(goes) if goes.is_dir() else goes.unlink()
            if left <= 0:
                raise ReadingStopped

        done = scrub(look(run, settings), LATE, hold=hold, work=Work(scanner=inline))
        order += [one.path for one in done.places if one.outcome is Outcome.GOOD]
        bad = {Path(one.path).name for one in done.places if one.outcome is Outcome.BAD}
        assert bad <= damaged
        without = status(look(run, settings)).summary.without_md5
        assert counts(run, settings) == (without, without)
        if not done.left:
            break
    else:
        raise AssertionError("it never ends")

    current_verdict = {save.name for save in saves if save.exists()}
    recorded = {name: found for id in late_md5_ids(run) for name, found in read_late_md5s(run, id).items()}
    for save in saves:
        right, own = expected[save.name], {k: v for k, v in recorded.items() if k in expected[save.name]}
        if save.name in damaged:
            assert own == {}
            bad_now = {s.path for s in look(run, settings).checkpoints} & set(status(look(run, settings)).bad)
            assert save.name not in current_verdict or save.name in bad_now
        elif save.name in current_verdict:
            assert own == right
        else:
            assert own in ({}, right)
    assert len(taken) == len(set(taken))
    assert counts(run, settings) == (0, 0)
    steps = [int(path.removesuffix(".pt").removesuffix(".safetensors").rpartition("-")[2]) for path in order]
    assert steps == sorted(steps)
    assert scrub(look(run, settings), LATE, work=Work(scanner=inline)).places == ()


def test_the_kept_copy_gives_it_where_the_place_is_damaged(root: Path) -> None:
    """The content that was sealed is good, and a whole copy of it is there."""
    root.mkdir(exist_ok=True)
    settings, chance = QUICK.changed(keep="copy"), random.Random(1)
    save = write(root, 1, chance)
    right = md5s_of(root, save)
    run = verified(root, settings)
    flip(next(iter(sorted(save.rglob("*.safetensors")))) if save.is_dir() else save, -9)
    first = scrub(look(run, settings), LATE, work=Work(scanner=inline))
    assert [one.outcome for one in first.places] == [Outcome.BAD]
    assert counts(run, settings) == (1, 1)
    scrub(look(run, settings), LATE, work=Work(scanner=inline))
    [id] = late_md5_ids(run)
    assert read_late_md5s(run, id) == right
    assert counts(run, settings) == (0, 0)


@pytest.mark.parametrize("digest", ["auto", "md5", "blake3"])
def test_the_reading_of_a_scrub_takes_it_unless_the_user_chose_blake3(root: Path, digest: str) -> None:
    """A plain scrub reads all. With `blake3` none is due, and none waits."""
    root.mkdir(exist_ok=True)
    settings = QUICK.changed(keep="none", digest=digest)
    for step in (1, 2):
        write(root, step, random.Random(step))
    run = verified(root, settings)
    waiting = 2 if digest == "auto" else 0
    assert counts(run, settings) == (waiting, waiting)
    scrub(look(run, settings), work=Work(scanner=inline))
    assert len(late_md5_ids(run)) == waiting
    assert counts(run, settings) == (0, 0)
