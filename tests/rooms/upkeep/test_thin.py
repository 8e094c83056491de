"""Thinning takes from old good checkpoints what only a resume needs. What stays is good, and nobody is led there."""

import contextlib
import copy
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import tempfile
import warnings
from pathlib import Path

import click.testing
import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.crashes import Killed, kill_at
from support.faults import flip
from support.guards import guarded
from support.json_documents import EXAMPLES, ordered, shape
from support.layouts import WRITERS
from support.layouts import sharded as save_sharded
from support.records_on_disk import files_of
from support.runs import QUICK
from support.views import look
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ckptguard
from ckptguard.cli.entry import commands
from ckptguard.errors import NoKnownGoodError, NotFoundError, RefusedError, StorageFullError
from ckptguard.records.manifests import write_manifest
from ckptguard.records.pins import list_pins, pin_checkpoint, release_pin
from ckptguard.records.run import open_run
from ckptguard.records.trash import list_trashed
from ckptguard.recover.restore import restore
from ckptguard.recover.roll_back import GoBack, known_good_of, roll_back
from ckptguard.repair.repair import repair
from ckptguard.repair.scrub import scrub
from ckptguard.replicas.replicate import find_known_good_anywhere, replicate
from ckptguard.retention import trash
from ckptguard.retention.prune import prune
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.runs.history import load_history
from ckptguard.storage.local.local_storage import LocalStorage, LocalUpload
from ckptguard.upkeep.budget import prune_and_thin
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.upkeep.thin import thin, thin_too
from ckptguard.values.ids import CheckpointId
from ckptguard.values.retention_policy import Policy
from ckptguard.values.verdict import Outcome
from ckptguard.verification.checkpoint import read_what_stays
from ckptguard.verification.target import verify_target

FULL = os.environ.get("CKPTGUARD_CAMPAIGN") == "full"
DAY = 86400.0
NONE = QUICK.changed(keep="none")
TWO = Policy(thin_after=2)
TAKEN = {  # layout -> the names that go
    "trainer": {"optimizer.pt", "scheduler.pt"},
    "adapter": {"optimizer.pt", "scheduler.pt"},
    "trainer-deepspeed": {
        "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
        "scheduler.pt",
    },
    "accelerate": {"optimizer.bin", "scheduler.bin"},
    "accelerate-deepspeed": {
        "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
        "scheduler.bin",
    },
    "accelerate-fsdp": {".metadata", "__0_0.distcp", "__0_1.distcp", "__0_2.distcp", "scheduler.bin"},
    "zero2": {
        "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
    },
}
ANEW = {  # layout -> the entry that goes, and the one of the weights
    "lightning": ("optimizer_states", "state_dict"),
    "megatron": ("optimizer", "model"),
    "plain": ("optimizer", "model"),
    "lightning-sharded": ("optimizer_0", "state_dict"),
    "dcp": ("optim", "model"),
}
REFUSED = {
    "zero3": "DeepSpeed ZeRO-3",
    "legacy": "wrote before 1.6",
}


def write_plain(root, step, seed):
    """A loop's own file: dicts, a tied weight, a list that two entries share, and a module's mode in the optimizer."""
    root.mkdir(parents=True, exist_ok=True)
    weight = torch.randn(24, 16, generator=torch.Generator().manual_seed(seed))
    lrs = [1e-3, [2e-3]]
    state = {
        "optimizer": {"state": {0: {"exp_avg": weight * 0.5, "master": weight}}, "param_groups": [{"lrs": lrs}]},
        "model": {"tied.weight": weight, "head.weight": weight.t(), "layer.weight": weight + 1},
        "lrs": lrs,
        "epoch": step,
    }
    torch.save(state, root / f"net-{step}.pt")
    return f"net-{step}.pt"


WRITERS = {**WRITERS, "plain": write_plain}


def run_command(*arguments):
    """Run a command in this process."""
    done = click.testing.CliRunner().invoke(commands, [str(a) for a in arguments], prog_name="ckptguard")
    assert "Traceback" not in done.output
    return done


def killed(*_):
    """Do as a process that is killed here."""
    raise Killed


def make(root, layout="trainer", steps=(100, 200, 300, 400), settings=NONE):
    """A verified run of this layout, and the paths of its checkpoints by step."""
    paths = {step: WRITERS[layout](root, step, step) for step in steps}
    reconcile(look(open_run(str(root)), settings), PassNotes())
    return paths


def in_place(root):
    """The bytes of all files of checkpoints, by path."""
    return {key: data for key, data in files_of(root).items() if not key.startswith("_ckptguard")}


def digests(manifest):
    """What was sealed of each tensor with bytes."""
    return {
        (file.path, tensor.name): file.spans[tensor.span].blake3
        for file in manifest.files
        for tensor in file.tensors
        if tensor.span is not None
    }


def thinned_of(root, policy=TWO, **how):
    """Thin, and return what was done; there are no problems."""
    done, troubles = thin(look(open_run(str(root)), NONE), policy, **how)
    assert troubles == ()
    return {one.path: one for one in done}


@pytest.mark.parametrize("layout", TAKEN)
def test_what_only_a_resume_needs_goes_and_the_rest_is_good(layout, root):
    """By name: exactly the expected files go, every other byte stays, and each verification is good."""
    paths = make(root, layout)
    before = in_place(root)
    planned = thinned_of(root, dry_run=True)
    assert in_place(root) == before
    assert thinned_of(root) == planned
    old = [paths[100], paths[200]]
    assert list(planned) == old
    gone = before.keys() - in_place(root).keys()
    assert {key.rpartition("/")[2] for key in gone} == TAKEN[layout]
    assert all(key.startswith((*(f"{path}/" for path in old),)) for key in gone)
    assert in_place(root) == {key: data for key, data in before.items() if key not in gone}
    assert sum(one.bytes for one in planned.values()) == sum(len(before[key]) for key in gone)
    report = verify_target(str(root), NONE)
    assert report.outcome is Outcome.GOOD
    notes = {c.path: [f.message for f in c.findings if "thinned" in f.message] for c in report.checkpoints}
    assert [bool(notes[path]) for path in paths.values()] == [True, True, False, False]
    history = load_history(open_run(str(root)))
    for step in (100, 200):
        [series] = {c.series for c in report.checkpoints}
        whole, left = (history.manifest(CheckpointId(series, step, n)) for n in (1, 2))
        assert digests(left).items() <= digests(whole).items()
        assert history.verdict(left.id).facts.thinned
        assert "model" in history.verdict(left.id).facts.resumable
        assert "optimizer" not in history.verdict(left.id).facts.resumable
    assert not reconcile(look(open_run(str(root)), NONE), PassNotes()).checked
    assert thinned_of(root) == {}


def loaded(files):
    """What loaders make of a checkpoint's files: the state in each archive, and in torch.distributed.checkpoint's
    folder."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for key, data in files.items():
            path = Path(folder, "in", key)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        for key in files:
            if key.endswith(".metadata"):
                out = Path(folder, "out.pt")
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    dcp_to_torch_save(Path(folder, "in", key).parent, out)
                found[key] = torch.load(out, weights_only=True)
            elif not key.endswith(".distcp"):
                safe = "iter_" not in key  # Megatron pickles its arguments
                found[key] = copy.deepcopy(torch.load(Path(folder, "in", key), weights_only=safe, mmap=True))
    return found


def flat(value, name=""):
    """Each value of a state by its name."""
    if isinstance(value, dict):
        return {k: v for key, part in value.items() for k, v in flat(part, f"{name}/{key}").items()}
    if isinstance(value, torch.Tensor):
        return {name: (value.dtype, value.shape, value.stride(), value.contiguous().view(-1).numpy().tobytes())}
    return {name: repr(value)}


@pytest.mark.parametrize("layout", ANEW)
def test_an_entry_that_only_a_resume_needs_goes_from_its_file(layout, root, tmp_path):
    """Loaded by torch, all that stays is as it was, to the bit and the stride; names, modes and times are, too."""
    paths = make(root, layout)
    goes, weights = ANEW[layout]
    before = in_place(root)
    others = {path: os.stat(path) for path in root.rglob("*") if "_ckptguard" not in str(path)}
    other_name = tmp_path / "hard link"
    first = max((key for key in before if key.startswith(paths[100])), key=lambda key: len(before[key]))
    os.link(root / first, other_name)
    planned = thinned_of(root, dry_run=True)
    assert in_place(root) == before
    assert thinned_of(root) == planned
    assert [*planned] == [paths[100], paths[200]]
    after = in_place(root)
    assert after.keys() <= before.keys()
    for key in before.keys() - after.keys():
        assert key.endswith(".distcp")  # it held nothing else
    for step, path in paths.items():
        own, now = ({k: v for k, v in files.items() if k.startswith(path)} for files in (before, after))
        assert (now == own) == (step > 200)
        whole, left = loaded(own), loaded(now)
        assert any(weights in state for state in left.values())
        for key, state in whole.items():
            if step <= 200:
                assert (goes in left[key]) is False
                state.pop(goes, None)
            assert flat(left[key]) == flat(state)
        gone = sum(map(len, own.values())) - sum(map(len, now.values()))
        assert step > 200 or gone >= planned[path].bytes > 0
    assert other_name.read_bytes() == before[first]
    for path, old in others.items():
        if path.is_file():
            now = path.stat()
            assert (now.st_mode, now.st_uid, now.st_mtime_ns) == (old.st_mode, old.st_uid, old.st_mtime_ns)
    report = verify_target(str(root), NONE)
    assert report.outcome is Outcome.GOOD
    assert not reconcile(look(open_run(str(root)), NONE), PassNotes()).checked
    assert thinned_of(root) == {}
    run = open_run(str(root))
    restore(look(run), str(tmp_path / "whole"), step=100)
    assert files_of(tmp_path / "whole") == {k: v for k, v in before.items() if k.startswith(paths[100])}
    prune(look(run, NONE), TWO, grace=0.0)
    restore(look(run), str(tmp_path / "thin"), step=100)
    assert files_of(tmp_path / "thin") == {k: v for k, v in after.items() if k.startswith(paths[100])}
    assert list((root / "_ckptguard").glob(".tmp-*")) == []


@pytest.mark.parametrize("layout", REFUSED)
def test_what_cannot_be_taken_apart_stays_whole(layout, root):
    """The reason is said, and no byte changes."""
    make(root, layout)
    before = in_place(root)
    done = thinned_of(root)
    assert len(done) == 2
    assert all(REFUSED[layout] in one.reason and not one.files for one in done.values())
    assert in_place(root) == before


def test_nobody_is_led_to_a_thinned_one_while_a_whole_one_is_good(root):
    """All whole ones are lost: known-good for a resume has none and says why, and a rollback refuses."""
    paths = make(root)
    thinned_of(root)
    run = open_run(str(root))
    assert find_known_good(run).step == 400
    assert find_known_good(run, before_step=400).step == 300
    with pytest.raises(NoKnownGoodError) as none:
        find_known_good(run, before_step=300)
    assert "is in the trash" in none.value.hint
    prune(look(run, NONE), TWO, grace=0.0)
    with pytest.raises(NoKnownGoodError) as none:
        find_known_good(run, before_step=300)
    assert f"{paths[200]} is good, but thinned" in none.value.hint
    with pytest.raises(NoKnownGoodError) as none:
        known_good_of(look(run, NONE), None, 100)
    assert f"{paths[100]} is thinned" in none.value.hint
    assert "model" in ckptguard.load(str(root / paths[100]))
    assert "optimizer" not in ckptguard.load(str(root), step=100)
    for step in (300, 400):
        shutil.rmtree(root / paths[step])
    with pytest.raises(NoKnownGoodError):
        roll_back(look(run, NONE), GoBack(reason="test", check_writing=False))
    done = run_command("known-good", str(root))
    assert (done.exit_code, done.stdout) == (0, f"{root}/{paths[200]}\n")
    assert "thinned" in done.stderr
    status = run_command("status", str(root)).stdout
    assert "protected? no: there is no known-good checkpoint to go back to" in status
    assert "would restart their optimizer" in status


def test_until_its_grace_is_over_the_whole_one_comes_back(root, tmp_path):
    """A restore of its step takes it from the trash; then what stayed, with the same bytes."""
    paths = make(root)
    saved = {key: data for key, data in in_place(root).items() if key.startswith(paths[100])}
    thinned_of(root)
    run = open_run(str(root))
    restore(look(run), str(tmp_path / "whole"), step=100)
    assert files_of(tmp_path / "whole") == saved
    prune(look(run, NONE), TWO, grace=0.0)
    assert list_trashed(run) == []
    restore(look(run), str(tmp_path / "thin"), step=100)
    assert files_of(tmp_path / "thin") == {k: v for k, v in saved.items() if not k.endswith(("mizer.pt", "duler.pt"))}


def test_the_whole_one_comes_back_if_what_stayed_is_gone(root, tmp_path):
    """The trainer rotates what stayed away. A save over it since would be the newer one."""
    paths = make(root)
    saved = {key: data for key, data in in_place(root).items() if key.startswith(f"{paths[100]}/")}
    thinned_of(root)
    shutil.rmtree(root / paths[100])
    run = open_run(str(root))
    restore(look(run), str(tmp_path / "whole"), step=100)
    assert files_of(tmp_path / "whole") == saved
    WRITERS["trainer"](root, 100, 77)
    reconcile(look(run, NONE), PassNotes())
    anew = {key: data for key, data in in_place(root).items() if key.startswith(f"{paths[100]}/")}
    restore(look(run), str(tmp_path / "anew"), step=100)
    assert files_of(tmp_path / "anew") == anew


MOMENTS = {"state": {0: {"exp_avg": torch.ones(8, 8)}}}
WEIGHT = torch.ones(8, 8)


@pytest.mark.parametrize(
    ("name", "state", "goes"),
    [
        ("optimizer.pt", MOMENTS, True),
        ("optimizer.pt", [MOMENTS, MOMENTS], True),
        ("optimizer.pt", {"optimizer": {"layers.0.weight": WEIGHT}}, True),
        ("optimizer.pt", {"state": {"layers.0.weight": {"square_avg": WEIGHT, "step": torch.tensor(3.0)}}}, True),
        ("optimizer.pt", {"state": {0: {"row": WEIGHT}}, "param_groups": [{"lr": torch.tensor(0.1)}]}, True),
        ("optimizer_net.pt", {"layers.0.weight": WEIGHT}, False),
        ("optimizer.pt", {"state": {"layers.0.weight": WEIGHT}}, False),
        ("optimizer.pt", {"state": {0: {"weight": WEIGHT}}}, False),
        ("optimizer.pt", {"model": {"layers.0.weight": WEIGHT}, **MOMENTS}, False),
        ("optim-ema.pt", {"ema": {"layers.0.weight": WEIGHT}, **MOMENTS}, False),
        ("optim.pt", {**MOMENTS, "prompt": torch.ones(8)}, False),
    ],
)
def test_no_file_goes_whose_own_tensors_may_be_weights(name, state, goes, root):
    """The file's name alone does not say it: each tensor in it must have a name that optimizers give."""
    for step in (100, 200, 300, 400):
        folder = root / f"step_{step}"
        folder.mkdir(parents=True)
        torch.save({"layer.weight": torch.full((8, 8), float(step))}, folder / "model.pt")
        torch.save(MOMENTS, folder / "optim_2.pt")
        torch.save(state, folder / name)
    reconcile(look(open_run(str(root)), NONE), PassNotes())
    done = thinned_of(root)
    assert [*done] == ["step_100", "step_200"]
    for path, one in done.items():
        assert set(one.files) == ({f"{path}/optim_2.pt", f"{path}/{name}"} if goes else set())
        assert goes or f"{name} holds tensors that may be weights" in one.reason


ADAM = {"state": {0: {"exp_avg": torch.ones(8, 8)}}, "param_groups": [{"lr": 0.1}]}
TWICE = {"state.0.linear.weight": WEIGHT, "state.1.linear.weight": WEIGHT}


@pytest.mark.parametrize("sharded", [False, True], ids=["file", "dcp"])
@pytest.mark.parametrize(
    ("beside", "goes"),
    [
        ({"optimizer_G": ADAM, "d_opt": ADAM}, [("optimizer_G", "state"), ("d_opt", "state")]),
        ({"opt": ADAM}, [("opt",)]),
        ({"opt": {"decoder.weight": WEIGHT}}, []),  # a model of that name
        ({"trainer": {"optimizer": ADAM, "epoch": 3}}, []),
        ({"agent": {"state": ADAM["state"], "epoch": 3}}, [("agent", "state")]),
        ({"exp_avg_model": {"layer.weight": WEIGHT}}, []),  # an average of the weights
        ({"encoder": TWICE}, []),
        ({"encoder": {"state": {0: {"kernel": WEIGHT}}}}, []),
        ({"state": {"metrics": {"loss": {"sum": WEIGHT}}, "optimizer": ADAM}}, [("state", "optimizer")]),
        ({"app": {"optimizer": ADAM}}, [("app", "optimizer")]),
    ],
)
def test_an_entry_goes_only_if_all_in_it_is_an_optimizers(beside, goes, sharded, root):
    """By its name, or else only the part that holds moments: whatever else is beside these stays."""
    for step in (100, 200, 300):
        state = {"net": {"layer.weight": torch.full((8, 8), float(step))}, "optimizer": ADAM}
        state |= {name: copy.deepcopy(value) for name, value in beside.items()}
        if sharded:
            save_sharded(root / f"step_{step}", state)
        else:
            root.mkdir(exist_ok=True)
            torch.save(state, root / f"step_{step}.pt")
    reconcile(look(open_run(str(root)), NONE), PassNotes())
    before = loaded(in_place(root))
    assert [bool(one.files) for one in thinned_of(root).values()] == [True]
    after = loaded(in_place(root))
    for key, whole in before.items():
        for place in [("optimizer",), *goes] if "100" in key else ():
            functools.reduce(dict.__getitem__, place[:-1], whole).pop(place[-1])
            if sharded and len(place) > 1 and not functools.reduce(dict.__getitem__, place[:-1], whole):
                whole.pop(place[0])  # no empty dict is stored there
        assert flat(after[key]) == flat(whole)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_values_that_are_no_tensors_go_from_every_file_of_a_sharded_one(threads, root):
    """torch spreads them over its threads' files: one has weights, and of the optimizer a learning rate alone."""
    for step in (300, 200, 100):
        model = {"w": torch.full((100, 100), float(step)), "v": torch.ones(90, 90)}
        state = {"model": model, "optim": ADAM, "step": 3, "name": "x"}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a single process saves is what we want
            dcp.save(state, storage_writer=dcp.FileSystemWriter(root / f"step_{step}", thread_count=threads))
    reconcile(look(open_run(str(root)), NONE), PassNotes())
    assert len(thinned_of(root)) == 1
    after = loaded({k: v for k, v in in_place(root).items() if "100" in k})
    assert flat(after["step_100/.metadata"]) == flat({k: v for k, v in state.items() if k != "optim"})
    assert verify_target(str(root), NONE).outcome is Outcome.GOOD


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_a_loader_between_two_exchanges_takes_no_bytes_of_another_tensor(count, threads, root):
    """Killed after some of the files changed places, with tensors of one size: torch loads the weights, or fails."""
    for step in (100, 200, 300):
        model = {f"w{n}": torch.full((9, 9), float(step + n)) for n in range(6)}
        moments = {n: {"exp_avg": torch.full((9, 9), -float(n))} for n in range(3)}
        state = {"optim": {"state": moments}, "model": model}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a single process saves is what we want
            dcp.save(state, storage_writer=dcp.FileSystemWriter(root / f"step_{step}", thread_count=threads))
    reconcile(look(open_run(str(root)), NONE), PassNotes())
    left, real = [killed] * (count < threads + 1), trash.swap_within
    turns = itertools.chain([real] * count, left, itertools.repeat(real))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trash, "swap_within", lambda *arguments: next(turns)(*arguments))
        with pytest.raises(Killed) if left else contextlib.nullcontext():
            thin(look(open_run(str(root)), NONE), TWO)
    found = {f"w{n}": torch.zeros(9, 9) for n in range(6)}
    with warnings.catch_warnings(), contextlib.suppress(CheckpointException):
        warnings.simplefilter("ignore")
        dcp.load({"model": found}, checkpoint_id=str(root / "step_100"))
    for n in range(6):
        assert set(found[f"w{n}"].view(-1).tolist()) <= {0.0, 100.0 + n}
    assert not left or 0 < count < threads + 1 or found["w5"].view(-1)[0] == 105.0
    prune(look(open_run(str(root)), NONE), Policy(), grace=DAY)
    assert loaded({k: v for k, v in in_place(root).items() if "100" in k})["step_100/.metadata"].keys() == {"model"}


def test_a_private_file_is_private_at_every_moment(root, monkeypatch):
    """Also while it waits among the records, where a default mode would let others read it."""
    paths, seen, real = make(root, "plain"), [], os.open
    for path in paths.values():
        os.chmod(root / path, 0o600)
    reconcile(look(open_run(str(root)), NONE), PassNotes())

    def watched(*arguments, **how):
        seen.extend(path.stat() for path in (root / "_ckptguard").glob(".tmp-*/net-*"))
        return real(*arguments, **how)

    monkeypatch.setattr(os, "open", watched)
    assert len(thinned_of(root)) == 2
    assert any(one.st_size for one in seen)
    assert not any(one.st_mode & 0o077 for one in seen if one.st_size)


AVERAGES = {
    "asgd": {"state": {0: {"ax": WEIGHT}}},
    "schedule-free": {"state": {0: {"z": WEIGHT, "exp_avg_sq": WEIGHT}}},
    "swa": {"state": {0: {"momentum_buffer": WEIGHT, "swa_buffer": WEIGHT}}},
    "nemo": {"opt": ADAM, "ema": (WEIGHT, WEIGHT)},
    "lookahead": {"state": {0: {"slow_buffer": WEIGHT, "exp_avg": WEIGHT}}},
}


@pytest.mark.parametrize("own", [True, False], ids=["own file", "one file"])
@pytest.mark.parametrize("kind", AVERAGES)
def test_an_average_of_the_weights_that_an_optimizer_keeps_stays(kind, own, root):
    """It is what is evaluated, and nothing else has it."""
    for step in (100, 200, 300):
        folder = root / f"step_{step}"
        folder.mkdir(parents=True)
        model = {"layer.weight": torch.full((8, 8), float(step))}
        torch.save(model if own else {"net": model, "optimizer": AVERAGES[kind]}, folder / "model.pt")
        if own:
            torch.save(AVERAGES[kind], folder / "optimizer.pt")
    reconcile(look(open_run(str(root)), NONE), PassNotes())
    before = in_place(root)
    [one] = thinned_of(root).values()
    assert one.files == ()
    assert in_place(root) == before


def test_a_name_with_a_dot_is_no_entry_of_a_sharded_optimizer(root):
    """A flat state dict has a module of the name that the optimizer beside it has: all stays."""
    for step in (100, 200, 300):
        state = {"optim.weight": torch.full((8, 8), float(step)), "head.weight": WEIGHT, "optim": ADAM}
        save_sharded(root / f"step_{step}", state)
    reconcile(look(open_run(str(root)), NONE), PassNotes())
    [one] = thinned_of(root).values()
    assert (one.files, one.reason) == ((), "a dot in its .metadata is part of a name")


def test_another_generation_is_not_touched(root):
    """Killed before what stays is sealed. Then a file is added, and `verify` seals that as the next generation."""
    paths = make(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trash, "write_manifest", killed)
        with pytest.raises(Killed):
            thin(look(open_run(str(root)), NONE), TWO)
    (root / paths[100] / "ema.safetensors").write_bytes((root / paths[100] / "model.safetensors").read_bytes())
    verify_target(str(root), NONE)
    run, before = open_run(str(root)), in_place(root)
    assert load_history(run).current("checkpoint-#", 100, paths[100]).generation == 2
    prune(look(run, NONE), TWO, grace=DAY)
    assert in_place(root) == before
    assert list_trashed(run) == []


def test_a_new_save_gets_nothing_of_the_old_one(root):
    """Killed between two moves. The trainer saves weights alone over it, and uses a file that was to go."""
    paths = make(root)
    saved = {key: data for key, data in in_place(root).items() if key.startswith(f"{paths[100]}/")}
    moved = []
    real = trash.move_within

    def one_only(*arguments):
        if moved:
            raise Killed
        moved.append(arguments)
        real(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trash, "move_within", one_only)
        with pytest.raises(Killed):
            thin(look(open_run(str(root)), NONE), TWO)
    run, whole = open_run(str(root)), CheckpointId("checkpoint-#", 100, 1)
    thinned = load_history(run).manifest(CheckpointId("checkpoint-#", 100, 2))
    anew = msgspec.structs.replace(thinned, generation=3, nonce="3", thinned=(), sealed_at="2030-01-01T00:00:00Z")
    write_manifest(run, anew)  # as a verification of the new save does
    before = in_place(root)
    prune(look(run, NONE), Policy(), grace=DAY)
    assert in_place(root) == before
    assert list_trashed(run) == [whole]
    kept = (root / "_ckptguard/trash").rglob(f"*{paths[100]}*/*")
    assert sorted(path.read_bytes() for path in kept) == sorted(saved.values())


@pytest.mark.parametrize("layout", ["trainer", "dcp"])
@pytest.mark.parametrize("what", ["os.access", "ckptguard.upkeep.thin.mount_of"])
def test_where_a_file_cannot_be_moved_nothing_is_begun(layout, what, root, monkeypatch):
    """A folder of another user, or another mount of one device: once it was sealed, it would be half thinned for
    ever."""
    paths = make(root, layout)
    before = in_place(root)
    real = os.access if what == "os.access" else None
    other = str(root / paths[100])
    if real is None:
        monkeypatch.setattr(what, lambda path: ("/other" if path == os.path.realpath(other) else "/", ""))
    else:
        monkeypatch.setattr(what, lambda path, *how: path != os.path.realpath(other) and real(path, *how))
    done = thinned_of(root)
    assert "nothing can be moved" in done[paths[100]].reason
    assert done[paths[200]].files
    kept = {key: data for key, data in before.items() if key.startswith(paths[100])}
    assert kept.items() <= in_place(root).items()
    assert verify_target(str(root), NONE).outcome is Outcome.GOOD


def test_where_nothing_can_be_linked_all_stays(root, monkeypatch):
    """A copy of the weights in the trash would take more room than what goes, and the lock for as long."""
    make(root)
    before = in_place(root)
    monkeypatch.setattr(trash, "copy_within", lambda *_, **__: "copy")
    done, troubles = thin(look(open_run(str(root)), NONE), TWO)
    assert done == ()
    assert "cannot be linked into the trash" in troubles[0]
    assert in_place(root) == before
    assert list_trashed(open_run(str(root))) == []


def test_pins_and_whatever_holds_one_keep_it_whole(root):
    """Pinned, named by a pointer, one of the newest, or with a newer one that has no verdict."""
    paths = make(root, steps=(100, 200, 300, 400, 500, 600))
    run = open_run(str(root))
    pin_checkpoint(run, CheckpointId("checkpoint-#", 100, 1))
    os.symlink(paths[200], root / "best")
    assert [*thinned_of(root, Policy(thin_after=3))] == [paths[300]]
    for pin in list_pins(run):
        release_pin(run, pin)
    WRITERS["trainer"](root, 700, 7)
    assert thinned_of(root, Policy(thin_after=1, keep_good=1)) == {}


def test_damage_found_while_thinning_takes_nothing(root):
    """What stays is read: a flipped weight is recorded, and nothing goes."""
    paths = make(root)
    flip(root / paths[100] / "model.safetensors")
    before = in_place(root)
    done, troubles = thin(look(open_run(str(root)), NONE), TWO)
    assert done == ()
    assert "model.safetensors differs" in troubles[0]
    assert in_place(root) == before
    history = load_history(open_run(str(root)))
    assert history.current_verdict(CheckpointId("checkpoint-#", 100, 1)).outcome is Outcome.BAD
    assert [*thinned_of(root)] == [paths[200]]


@pytest.mark.parametrize("layout", ["trainer", "zero2", "accelerate-fsdp"])
def test_a_file_that_is_added_does_not_make_it_whole_or_incomplete(layout, root, tmp_path):
    """Weights that a user converts and puts beside: a new generation, good and thinned as before."""
    paths = make(root, layout)
    whole = {key: data for key, data in in_place(root).items() if key.startswith(f"{paths[200]}/")}
    thinned_of(root)
    torch.save({"layers.0.weight": torch.eye(24, 16)}, root / paths[200] / "ema.bin")
    report = verify_target(str(root), NONE)
    assert report.outcome is Outcome.GOOD
    run = open_run(str(root))
    history = load_history(run)
    id = history.current(report.checkpoints[0].series, 200, paths[200])
    assert id.generation == 3
    assert history.manifest(id).thinned
    for step in (300, 400):
        shutil.rmtree(root / paths[step])
    with pytest.raises(NoKnownGoodError):
        find_known_good(run)
    restore(look(run), str(tmp_path / "whole"), step=200)
    assert files_of(tmp_path / "whole") == whole


def test_a_thinned_one_that_is_saved_again_is_whole_again(root):
    """The trainer writes it anew, or its optimizer is put beside it: a generation of its own, which is not thinned."""
    paths = make(root)
    saved = in_place(root)
    thinned_of(root)
    for name in ("optimizer.pt", "scheduler.pt"):
        (root / paths[200] / name).write_bytes(saved[f"{paths[200]}/{name}"])
    shutil.rmtree(root / paths[100])
    WRITERS["trainer"](root, 100, 99)
    assert verify_target(str(root), NONE).outcome is Outcome.GOOD
    history = load_history(open_run(str(root)))
    for step in (100, 200):
        id = history.current("checkpoint-#", step, paths[step])
        assert id.generation == 3
        assert history.manifest(id).thinned == ()


def test_prune_keeps_the_newest_whole_ones_whatever_is_thinned(root):
    """Two whole ones are lost: thinned ones take no place of the newest good ones, and rules still count them."""
    paths = make(root, steps=(100, 200, 300, 400, 500))
    thinned_of(root)
    run = open_run(str(root))
    shutil.rmtree(root / paths[500])
    assert [d.checkpoint.id.step for d in prune(look(run, NONE), Policy(keep_last=1), grace=DAY).removed] == [
        100,
        200,
        300,
    ]


@pytest.mark.parametrize("layout", ["trainer", "lightning", "dcp"])
def test_a_replica_keeps_the_whole_one(layout, root, tmp_path):
    """Where the whole one has arrived, what stays is not sent, and the replica is up to date."""
    make(root, layout)
    run, url = open_run(str(root)), str(tmp_path / "replica")
    replicate(look(run, NONE), url)
    whole = in_place(tmp_path / "replica")
    thinned_of(root)
    done = replicate(look(run, NONE), url)
    assert (done.behind, done.trouble) == (0, None)
    assert in_place(tmp_path / "replica") == whole


def test_a_suspicion_of_what_stays_is_one_of_the_whole(root, tmp_path):
    """A rollback past a thinned one makes it suspect: neither the trash nor a replica gives the whole one as good."""
    paths = make(root)
    run, url = open_run(str(root)), str(tmp_path / "replica")
    settings = NONE.changed(replicas=(url,))
    replicate(look(run, settings), url)
    pin_checkpoint(run, CheckpointId("checkpoint-#", 100, 1))
    thinned_of(root)
    done = roll_back(look(run, settings), GoBack(reason="test", before_step=200, check_writing=False))
    assert done.known_good.path == f"{root}/{paths[100]}"
    assert not load_history(run).is_good(CheckpointId("checkpoint-#", 200, 1))
    assert find_known_good_anywhere(look(run, settings)).step == 100
    with pytest.raises(RefusedError):
        restore(look(run, NONE), str(tmp_path / "out"), step=200)


def test_a_doubted_one_in_the_trash_takes_no_place_of_a_good_one(root):
    """A rollback makes what is left of 300 suspect: its whole one is not why that of 100 is emptied."""
    make(root, steps=(100, 200, 300, 400, 500))
    run, whole = open_run(str(root)), CheckpointId("checkpoint-#", 100, 1)
    pin_checkpoint(run, CheckpointId("checkpoint-#", 200, 1))
    thinned_of(root)
    roll_back(look(run, NONE), GoBack(reason="test", before_step=300, check_writing=False))
    history = load_history(run)
    assert (history.is_good(whole), history.is_good(CheckpointId("checkpoint-#", 300, 1))) == (True, False)
    prune(look(run, NONE), Policy(keep_good=2), grace=0.0)
    assert whole in list_trashed(run)


def test_the_settings_thin_in_a_pass(root):
    """`thin_after` in the settings is what `prune --thin-after` does, and the pass says which paths."""
    settings = NONE.changed(thin_after=2)
    paths = {step: WRITERS["trainer"](root, step, step) for step in (100, 200, 300)}
    done = reconcile(look(open_run(str(root)), settings), PassNotes())
    assert done.thinned == (paths[100],)
    assert done.could_not_tell == ()


def test_a_pass_thins_one_and_the_next_follows_at_once(root, monkeypatch):
    """A new save does not wait until all old ones are thinned. After a problem nothing is read again for a while."""
    paths, settings, notes = make(root, steps=(100, 200, 300, 400, 500)), NONE.changed(thin_after=2), PassNotes()
    first, second, third, last = (reconcile(look(open_run(str(root)), settings), notes) for _ in range(4))
    assert [one.thinned for one in (first, second, third, last)] == [*[(paths[s],) for s in (100, 200, 300)], ()]
    assert [one.yielded for one in (first, second, third, last)] == [True, True, False, False]
    WRITERS["trainer"](root, 600, 600)
    tried = []
    monkeypatch.setattr("ckptguard.upkeep.thin.judge_thinned", lambda *_: tried.append(1) or "it would be suspect")
    for _ in range(3):
        notes.prune_at = 0.0
        reconcile(look(open_run(str(root)), settings), notes)
    assert len(tried) == 1


def test_the_command_says_what_it_would_take(root):
    """A dry run has the files and the bytes, as lines and as JSON."""
    paths = make(root)
    said = run_command("prune", str(root), "--thin-after", "2", "--dry-run")
    assert f"would take optimizer.pt, scheduler.pt from {paths[100]}" in said.stdout
    document = json.loads(run_command("prune", str(root), "--thin-after", "2", "--dry-run", "--json").stdout)
    assert [one["path"] for one in document["thinned"]] == [paths[100], paths[200]]
    assert all(one["bytes"] > 0 for one in document["thinned"])
    assert [ordered(shape(one)) for one in document["thinned"][:1]] == [ordered(shape(EXAMPLES["prune"]["thinned"][0]))]
    assert run_command("prune", str(root), "--thin-after", "2").exit_code == 0
    assert not (root / paths[100] / "optimizer.pt").exists()


@pytest.mark.parametrize("layout", [*TAKEN, *ANEW])
def test_empty_folders_around_a_checkpoint_stay(layout, root):
    """Those of a user are no business of ours, and those among the records are needed."""
    make(root, layout)
    empty = [root / "notes" / "empty", root / "empty", root / "_ckptguard" / "quarantine"]
    for folder in empty:
        folder.mkdir(parents=True)
    assert any(not one.reason for one in thinned_of(root).values())
    assert all(folder.is_dir() for folder in empty)


def files_under(path, files):
    """Those of one checkpoint: `checkpoint-1000` is none of `checkpoint-100`."""
    return {key: data for key, data in files.items() if key == path or key.startswith(f"{path}/")}


class Sequence:
    """Acts on a run in any order, and what must hold after each of them."""

    def __init__(self, root, seed, layout):
        self.root, self.layout, self.random, self.step = root, layout, random.Random(seed), 0
        self.saved: dict[str, dict[str, bytes]] = {}  # the bytes of each checkpoint as it was saved
        self.seen: dict[bytes, bool] = {}
        self.replica = root.with_name("replica")
        self.said = [f"seed {seed}, {layout}"]
        (root / "notes" / "empty").mkdir(parents=True)  # of the user
        self.save()

    @property
    def run(self):
        return open_run(str(self.root))

    def go_on(self):
        often = (self.save, self.save, self.thin, self.thin, self.kill)
        act = self.random.choice((*often, self.prune, self.budget, self.restore, self.back, self.send, self.mend))
        self.said.append(act.__name__)
        act()
        self.check()

    def save(self):
        self.step += 100
        path = WRITERS[self.layout](self.root, self.step, self.step)
        self.saved[path] = files_under(path, in_place(self.root))
        reconcile(look(self.run, NONE), PassNotes())

    def thin(self):
        _, troubles = thin(look(self.run, NONE), Policy(thin_after=self.random.choice((1, 2, 3))))
        assert troubles == (), self.said

    def prune(self):
        grace = self.random.choice((0.0, DAY))
        policy = Policy(keep_last=self.random.choice((2, 3, 5)), thin_after=self.random.choice((None, 2)))
        done = thin_too(look(self.run, NONE), prune(look(self.run, NONE), policy, grace=grace))
        assert done.could_not_tell == (), self.said

    def budget(self):
        """Whatever the budget is, the newest whole ones stay: some are above what it asks for."""
        policy = Policy(keep_bytes=self.random.choice((1, 60_000, 120_000, 10**9)))
        done = prune_and_thin(look(self.run, NONE), policy, grace=self.random.choice((0.0, DAY)))
        assert done.could_not_tell == (), self.said

    def send(self):
        """To a replica, which may be thinned with the run; then all is read again."""
        done = replicate(look(self.run, self.settings(self.random.random() < 0.5)), str(self.replica))
        assert done.trouble is None, self.said
        scrubbed = scrub(look(self.run, NONE))
        assert scrubbed.could_not_tell == (), (self.said, scrubbed)

    def mend(self):
        """A byte of a whole good one is damaged, and comes back from the replica."""
        settings = self.settings(False)
        assert replicate(look(self.run, settings), str(self.replica)).trouble is None, self.said
        path = os.path.relpath(find_known_good(self.run).path, self.root)
        key = max(self.saved[path], key=lambda key: len(self.saved[path][key]))
        flip(self.root / key, -20)
        repaired = repair(look(self.run, settings), path)
        assert repaired.could_not_tell == (), (self.said, repaired)
        assert (self.root / key).read_bytes() == self.saved[path][key], self.said

    def settings(self, thins):
        return NONE.changed(replicas=(str(self.replica),), replica_thin=thins)

    def kill(self):
        """Killed at any step of a thinning; then somebody verifies, or a pass is made, or the next act comes."""
        with contextlib.suppress(Killed), kill_at(self.random.randrange(1, 30)):
            thin(look(self.run, NONE), Policy(thin_after=self.random.choice((1, 2))))
        after = self.random.choice(("verify", "pass", "nothing"))
        if after == "verify":
            report = verify_target(str(self.root), NONE)
            assert report.outcome in (Outcome.GOOD, Outcome.PENDING), (self.said, report.checkpoints)
        if after == "pass":
            reconcile(look(self.run, NONE), PassNotes())

    def restore(self):
        """Any step that is in place, or in the trash: each file that comes back is as it was saved."""
        step, out = self.random.randrange(100, self.step + 100, 100), self.root.with_name("out")
        with contextlib.suppress(NotFoundError, RefusedError):  # a rollback made it suspect
            restore(look(self.run, NONE), str(out), step=step)
            path = next(path for path in self.saved if re.search(rf"\D{step}\b", path))
            back = files_of(out)
            assert back.items() <= self.saved[path].items() or self.is_left(path, back), self.said
            assert self.layout in ANEW or any("model" in key for key in back), self.said
        shutil.rmtree(out, ignore_errors=True)

    def back(self):
        """A rollback before the newest leads to a whole one, or says that there is none."""
        with contextlib.suppress(NoKnownGoodError):
            done = roll_back(look(self.run, NONE), GoBack(reason="test", before_step=self.step, check_writing=False))
            self.is_whole(done.known_good.path)

    def check(self):
        assert (self.root / "notes" / "empty").is_dir(), self.said
        self.is_whole(find_known_good(self.run).path)
        now = in_place(self.root)
        for path, files in self.saved.items():
            kept = files_under(path, now)
            if self.layout in ANEW:
                assert not kept or kept == files or self.is_left(path, kept), self.said
                continue
            assert kept.items() <= files.items(), self.said
            for key in files.keys() - kept.keys() if kept else ():
                assert key.rpartition("/")[2] in TAKEN[self.layout], (self.said, key)

    def is_left(self, path, kept):
        """True if these are the files of a checkpoint without its optimizer, by what loaders make of them."""
        key = hashlib.sha256(repr(sorted(kept.items())).encode()).digest()
        if key not in self.seen:
            whole, left = loaded(self.saved[path]), loaded(kept)
            for state in whole.values():
                state.pop(ANEW[self.layout][0], None)
            self.seen[key] = {k: flat(v) for k, v in whole.items()} == {k: flat(v) for k, v in left.items()}
        return self.seen[key]

    def is_whole(self, path):
        own = self.saved[os.path.relpath(path, self.root)]
        assert {key: (self.root / key).read_bytes() for key in own} == own, self.said


@pytest.mark.campaign
@pytest.mark.parametrize("layout", ["trainer", "zero2", "accelerate-fsdp", "lightning", "dcp"])
@pytest.mark.parametrize("seed", range(400 if FULL else 2))
def test_whatever_is_done_a_whole_one_is_known_good_and_no_weight_is_lost(seed, layout, root):
    """Save, thin, prune, keep a budget, replicate, scrub, repair, roll back, restore, be killed in a thinning, in any
    order: known-good is as it was saved, and of each checkpoint in place only what a resume needs may be gone."""
    sequence = Sequence(root, seed, layout)
    for _ in range(20):
        sequence.go_on()


def test_a_full_disk_while_a_file_is_written_anew_leaves_the_old_one(root, monkeypatch):
    """A write fails, or there is too little room beside the next saves: it is said, and nothing is left behind."""
    make(root, "lightning")
    before = in_place(root)
    real = LocalUpload.write

    def full(upload, data):
        if len(data) > 64:
            raise StorageFullError("no space left on device", key="x")
        real(upload, data)

    with monkeypatch.context() as patch:
        patch.setattr(LocalUpload, "write", full)
        done, troubles = thin(look(open_run(str(root)), NONE), TWO)
    assert done == ()
    assert "no space left" in troubles[0]
    monkeypatch.setattr(LocalStorage, "free_space", lambda _: 10_000)
    done, troubles = thin(look(open_run(str(root)), NONE), TWO)
    assert done == ()
    assert "the room of the next saves" in troubles[0]
    assert in_place(root) == before
    assert list((root / "_ckptguard").glob(".tmp-*")) == []
    assert list_trashed(open_run(str(root))) == []


@pytest.mark.parametrize("layout", ["plain", "dcp"])
@pytest.mark.parametrize("part", range(4))
def test_damage_in_a_file_that_is_written_anew_takes_nothing(layout, part, root):
    """A byte in any part of what stays: the damage is recorded, and nothing goes."""
    paths = make(root, layout)
    files = [root / key for key in in_place(root) if key.startswith(paths[100])]
    path = max(files, key=lambda file: (b"tied" in file.read_bytes(), file.name == "__0_1.distcp", file.name))
    data = bytearray(path.read_bytes())
    place = data.find(b"tied.weight") if layout == "plain" else data.find(b"storage")
    places = (place + 1, len(data) - 30, data.rfind(b"/data/") - 20, len(data) // 2)
    data[places[part]] ^= 1
    old = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))
    before = in_place(root)
    done, troubles = thin(look(open_run(str(root)), NONE), TWO)
    assert in_place(root).keys() == before.keys()
    now = in_place(root)
    harmed = {key for key in before if key.startswith(paths[100])}
    assert all(now[key] == before[key] for key in harmed), (done, troubles)


def test_a_file_that_is_saved_again_meanwhile_stays(root, monkeypatch):
    """The trainer replaces it while it is read, or between the last look and the exchange: its new bytes stay."""
    paths = make(root, "lightning")
    anew = (root / paths[300]).read_bytes()

    def save_again(*_):
        (root / "tmp").write_bytes(anew)
        os.replace(root / "tmp", root / paths[100])

    def after(function):
        def call(*arguments, **options):
            made = function(*arguments, **options)
            save_again()
            return made

        return call

    with monkeypatch.context() as patch:
        patch.setattr("ckptguard.upkeep.thin.read_what_stays", after(read_what_stays))
        done, troubles = thin(look(open_run(str(root)), NONE), TWO)
    assert done == ()
    assert "was not thinned" in troubles[0]
    assert (root / paths[100]).read_bytes() == anew
    reconcile(look(open_run(str(root)), NONE), PassNotes())
    with monkeypatch.context() as patch:
        patch.setattr(trash, "find_entry", after(trash.find_entry))
        thin(look(open_run(str(root)), NONE), TWO)
    assert (root / paths[100]).read_bytes() == anew
    reconcile(look(open_run(str(root)), NONE), PassNotes())
    assert (root / paths[100]).read_bytes() == anew
    assert find_known_good(open_run(str(root))).step == 400


def test_where_files_cannot_be_exchanged_all_stays(root, monkeypatch):
    """The reason is said once, and the next pass reads no manifest for it."""
    make(root, "lightning")
    before = in_place(root)
    monkeypatch.setattr("ckptguard.upkeep.write_anew.swap_files", lambda *_: False)
    refused: dict[CheckpointId, str] = {}
    for _ in range(2):
        done, troubles = thin(look(open_run(str(root)), NONE), TWO, refused=refused)
        assert troubles == ()
        assert all("cannot exchange" in one.reason and not one.files for one in done)
        assert len(done) == len(refused) == 2
        monkeypatch.setattr("ckptguard.upkeep.thin.split_for_thinning", None)
    assert in_place(root) == before


def test_a_guards_own_save_keeps_the_model(root):
    """The file of optimizer state goes; the rest loads, and a guard goes on from a whole one."""
    settings = QUICK.changed(keep="none")
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    weights = {}
    with guarded(root, model, optimizer) as guard:
        for step in range(1, 5):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            weights[step] = {name: value.clone() for name, value in model.state_dict().items()}
            guard.save(step=step)
    reconcile(look(open_run(str(root)), settings), PassNotes())
    done = thinned_of(root)
    assert {key.rpartition("/")[2] for one in done.values() for key in one.files} == {"optimizer.safetensors"}
    assert len(done) == 2
    assert verify_target(str(root), NONE).outcome is Outcome.GOOD
    for step in (1, 2):
        state = ckptguard.load(str(root), step=step)
        assert "optimizer" not in state
        assert all(torch.equal(state["model"][name], value) for name, value in weights[step].items())
    assert "optimizer" in ckptguard.load(str(root), step=4)
    assert find_known_good(open_run(str(root))).step == 4


@pytest.mark.parametrize("layout", ["trainer", "zero2", "lightning", "dcp"])
def test_a_rollback_takes_the_whole_one_from_the_trash(layout, root):
    """With `thin_after` 1 and a late doubt about the newest, nothing whole is left in place: what is in the trash comes
    back, to the bit, and is said. A plan changes nothing."""
    paths, settings = make(root, layout, steps=(100, 200, 300)), NONE.changed(keep_good=1)
    saved = in_place(root)
    done, troubles = thin(look(open_run(str(root)), settings), Policy(thin_after=1, keep_good=1))
    assert (len(done), troubles) == (2, ())
    run, back = open_run(str(root)), GoBack(reason="test", before_step=300, check_writing=False)
    left = in_place(root)
    with pytest.raises(NoKnownGoodError) as none:
        roll_back(look(run, settings), dataclasses.replace(back, dry_run=True))
    assert f"{paths[200]} comes back whole from the trash" in none.value.hint
    assert in_place(root) == left
    went = roll_back(look(run, settings), back)
    assert went.known_good.path == f"{root}/{paths[200]}"
    assert went.whole_again == paths[200]
    assert "came back whole from the trash" in went.copied
    own = {key: data for key, data in saved.items() if key.startswith(paths[200])}
    assert {key: data for key, data in in_place(root).items() if key.startswith(paths[200])} == own
    assert find_known_good(run).step == 200
    assert {id.step for id in list_trashed(run)} == {100}
    assert verify_target(str(root), NONE).outcome is Outcome.GOOD


@pytest.mark.parametrize("layout", ["trainer", "lightning"])
def test_killed_while_the_whole_one_comes_back(layout, root):
    """At any step: the next rollback ends the same, and no byte is lost."""
    paths, settings = make(root, layout, steps=(100, 200)), NONE.changed(keep_good=1)
    own = {key: data for key, data in in_place(root).items() if key.startswith(paths[100])}
    thin(look(open_run(str(root)), settings), Policy(thin_after=1, keep_good=1))
    back = GoBack(reason="test", before_step=200, check_writing=False)
    for number in itertools.count(1):
        copied = root.with_name(f"run-{number}")
        shutil.copytree(root, copied, copy_function=os.link)
        run = open_run(str(copied))
        try:
            with kill_at(number):
                roll_back(look(run, settings), back)
            killed_there = False
        except Killed:
            killed_there = True
            if number % 2:
                assert verify_target(str(copied), NONE).outcome in (Outcome.GOOD, Outcome.SUSPECT)
            with contextlib.suppress(NoKnownGoodError):
                prune(look(run, settings), Policy(), grace=DAY)
            roll_back(look(run, settings), back)
        assert {key: data for key, data in in_place(copied).items() if key.startswith(paths[100])} == own, number
        assert find_known_good(run).step == 100
        shutil.rmtree(copied)
        if not killed_there:
            break
    assert number > 5


@pytest.mark.parametrize(("layout", "name"), [("trainer", "optimizer.pt"), ("lightning", "")])
def test_what_a_checksum_file_is_about_stays(layout, name, root):
    """Without the file, or with another one, the checksum file would make what is left bad."""
    for step in (100, 200, 300, 400):
        path = root / WRITERS[layout](root, step, step) / name
        path.with_name(f"{path.name}.md5").write_text(f"{hashlib.md5(path.read_bytes()).hexdigest()}  {path.name}\n")
    reconcile(look(open_run(str(root)), NONE), PassNotes())
    before = in_place(root)
    done = thinned_of(root)
    assert len(done) == 2
    assert all(".md5 states what" in one.reason for one in done.values())
    assert in_place(root) == before
    assert verify_target(str(root), NONE).outcome is Outcome.GOOD
