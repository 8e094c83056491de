"""Which saves are sick: training is at fault, and not storage."""

import itertools
import json
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import trainer_saves
from support.runs import save_file, state_dict, write_torch
from support.trainer_saves import SICK, TRAINERS, fairseq, numbered, save
from support.views import look

from ckptguard.decisions.restarts import is_far_before
from ckptguard.engine.sick_saves import find_fresh_start, find_sick_saves, sickness_in
from ckptguard.recover.rollback_scope import content_of
from ckptguard.runs.find_known_good import known_good_candidates
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.verdict import Finding, Outcome, Severity, Verdict
from ckptguard.verification.checkpoint import verify_checkpoint

NAN = Finding(check="finite", severity=Severity.ERROR, message="1 NaN", tensor="w", count=1)
DIGEST = Finding(check="digests", severity=Severity.ERROR, message="it differs")
ZEROS = Finding(check="finite", severity=Severity.ERROR, message="all 3 float matrices of the model are zero")
STALE = Finding(check="stale", severity=Severity.SICKNESS, message="nothing changed")
MARKED = Finding(check="incident", severity=Severity.SICKNESS, message="sick soon after")
SCHEMA = Finding(check="schema", severity=Severity.ERROR, message="missing")
MISSING = Finding(check="completeness", severity=Severity.ERROR, message="missing")
LOGGED = Finding(check="finite", severity=Severity.NOTICE, message="nan", tensor="best", count=1)


def verdict(*findings, **more):
    """A verdict with these findings."""
    fields = {"series": "s", "step": 1, "generation": 1, "outcome": Outcome.BAD, "checked_at": "t", "version": "v"}
    return Verdict(**{**fields, "findings": findings, **more})


@pytest.mark.parametrize(
    ("findings", "is_sick"),
    [
        ((NAN,), True),
        ((NAN, SCHEMA), True),
        ((STALE,), True),
        ((NAN, DIGEST), False),
        ((ZEROS,), False),
        ((MARKED,), False),
        ((SCHEMA,), False),
        ((MISSING,), False),
        ((LOGGED,), False),
        ((), False),
    ],
)
def test_damage_schema_and_incompleteness_are_no_sickness(findings, is_sick):
    """Only what training itself did counts, and what others marked was acted on already."""
    assert (sickness_in(verdict(*findings)) is not None) == is_sick


def test_bytes_that_changed_under_a_seal_are_damage_whatever_they_hold():
    """A flipped bit may well make a NaN."""
    assert sickness_in(verdict(NAN, place_damaged=True)) is None


def write_sick(run, name, seed=9):
    """A torch file with NaN in it."""
    state = state_dict(seed)
    state["embed.weight"][0, 0] = float("nan")
    torch.save(state, run / name)


@pytest.fixture
def folder(tmp_path):
    """A run with two good checkpoints."""
    run = tmp_path / "run"
    for step in (1, 2):
        write_torch(run, step, seed=step)
    return run


def found(folder, before=()):
    """The sick saves after a pass."""
    reconcile(look(str(folder)), PassNotes())
    return find_sick_saves(look(str(folder)), before=before)


def test_the_newest_judged_save_counts(folder):
    """A sick one under a newer good one is history, and one under a newer damaged one is not."""
    assert found(folder) == []
    write_sick(folder, "net-3.pt")
    [sick] = found(folder)
    assert (sick.path, sick.step, sick.series) == ("net-3.pt", 3, "net-#.pt")
    (folder / "net-4.pt").write_bytes(b"no archive at all")
    assert [s.path for s in found(folder)] == ["net-3.pt"]
    write_torch(folder, 5, seed=5)
    assert found(folder) == []


def test_a_dump_that_was_never_good_is_no_reason(folder):
    """NaN beside good checkpoints, in what training does not resume from."""
    for name in ("dump-7.pt", "activations.pt"):
        torch.save({"activations": torch.full((3, 3), float("nan"))}, folder / name)
    assert found(folder) == []


@pytest.mark.parametrize("name", ["last.pt", "other-7.pt"])
def test_another_name_for_the_same_weights_is_a_reason_once_the_command_wrote_it(folder, name):
    """Training may well resume from it. What lay there before is somebody else's."""
    write_sick(folder, name)
    assert [s.path for s in found(folder)] == [name]
    lying = [c.signature for c in look(str(folder)).checkpoints]
    assert find_sick_saves(look(str(folder)), before=lying) == []


@pytest.mark.parametrize("tensors", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 5, 768])
def test_nan_in_a_file_of_few_tensors_is_sick(tmp_path, tensors, size):
    """Saved over one name that nothing checks (textual inversion): training is at fault, and not storage."""
    path = tmp_path / "learned_embeds.safetensors"
    for seconds, number in enumerate((1.0, float("nan"))):
        save_file({f"t{n}": (torch.rand(size) + 1) * number for n in range(tensors)}, path)
        os.utime(path, ns=(10**18, 10**18 + seconds))
        assert [s.path for s in found(tmp_path)] == [path.name] * seconds


@pytest.mark.parametrize("name", sorted(TRAINERS))
def test_the_sick_save_of_every_trainer_is_seen(tmp_path, name):
    """Under numbered names, several numbers, and fixed ones."""
    train, resume = TRAINERS[name]
    for epoch in (1, 2):
        train(tmp_path, epoch)
        assert found(tmp_path) == []
    train(tmp_path, 3, sick=SICK)
    saved = (tmp_path / resume).resolve().relative_to(tmp_path)  # a link is no checkpoint of its own
    assert str(saved) in [s.path for s in found(tmp_path)]


def test_the_order_of_saving_tells_which_save_is_newest(tmp_path):
    """A training from scratch writes low numbers over old ones; of what lay there before, the numbers tell."""
    for epoch in (1, 2, 3):
        fairseq(tmp_path, epoch)
    (tmp_path / "checkpoint_last.pt").unlink()
    assert found(tmp_path) == []
    save(tmp_path / "checkpoint_1_10.pt", 10, sick=SICK)
    later = (tmp_path / "checkpoint_1_30.pt").stat().st_mtime + 5
    os.utime(tmp_path / "checkpoint_1_10.pt", (later, later))
    assert [s.path for s in found(tmp_path)] == ["checkpoint_1_10.pt"]
    lying = [c.signature for c in look(str(tmp_path)).checkpoints]
    assert find_sick_saves(look(str(tmp_path)), before=lying) == []


@given(st.integers(1, 10**6), st.integers(0, 10**6), st.sampled_from(["global_step", "epoch", "optimizer step"]))
def test_what_is_nearer_to_the_beginning_began_anew(there, here, kind):
    """And an optimizer that starts from scratch alone does not count."""
    assert (is_far_before({kind: here}, {kind: there}) is not None) == (here * 2 <= there)
    assert is_far_before({kind: here, "epoch in its name": 9}, {kind: there, "epoch in its name": 8}) in (None, kind)
    assert is_far_before({"optimizer step": 1, "epoch": 9}, {"optimizer step": 99, "epoch": 8}) is None
    assert is_far_before({kind: here}, {}) is None


def test_without_anything_good_only_a_new_save_is_a_reason(tmp_path):
    """What lay there before may be anything."""
    run = tmp_path / "run"
    run.mkdir()
    write_sick(run, "net-1.pt")
    lying = [c.signature for c in look(str(run)).checkpoints]
    assert found(run, before=lying) == []
    write_sick(run, "net-2.pt", seed=8)
    assert [s.path for s in found(run, before=lying)] == ["net-2.pt"]


def write_hf(run, step, norms, *, scaler=False, last=None):
    """A Trainer's folder with a log of gradient norms."""
    folder = run / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    torch.save(state_dict(step), folder / "pytorch_model.bin")
    if scaler:
        torch.save({"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5}, folder / "scaler.pt")
    history = [{"step": step - len(norms) + i + 1, "grad_norm": norm, "loss": 0.0} for i, norm in enumerate(norms)]
    state = {"global_step": step, "log_history": [*history, *([last] if last else [])]}
    (folder / "trainer_state.json").write_text(json.dumps(state))


NAN_NORM = float("nan")


@pytest.mark.parametrize(
    ("norms", "scaler", "since"),
    [
        ([0.5, 0.5, 0.4], False, None),
        ([0.5, 0.5, NAN_NORM], False, 20),
        ([0.5, NAN_NORM, float("inf")], False, 19),
        ([NAN_NORM, 0.5, 0.4], False, None),
        ([0.5, NAN_NORM, float("inf")], True, None),  # how a scaler finds its scale
        ([0.5, *[NAN_NORM] * 5], True, 16),
        ([0.5, 0.4, float("inf")], False, None),  # a scaler may have been there that was not saved
        ([0.5, *[float("inf")] * 4], False, None),
        ([0.5, *[float("inf")] * 5], False, 16),
        ([0.5, 0.4, 10**400], False, None),
    ],
)
def test_the_trainers_own_log_counts_from_its_onset(tmp_path, norms, scaler, since):
    """A finite save whose log ends with gradient norms that are not is sick, since the first of them."""
    run = tmp_path / "run"
    write_hf(run, 10, [0.5, 0.4])
    write_hf(run, 20, norms, scaler=scaler, last={"step": 20, "eval_loss": 1.0})
    sick = found(run)
    assert [s.since for s in sick] == ([] if since is None else [since])


def test_a_log_that_cannot_be_read_is_no_sickness(tmp_path):
    """Neither nonsense, nor entries of other types."""
    run = tmp_path / "run"
    write_hf(run, 10, [0.5])
    write_hf(run, 20, [0.5])
    place = run / "checkpoint-20" / "trainer_state.json"
    for text in ('{"global_step": 20, "log_history": [7, {"grad_norm": "nan", "step": 20}, {"grad_norm": NaN}]}', "{"):
        place.write_text(text)
        assert found(run) == []


@pytest.mark.parametrize("saves", [1, 2, 3, 4])
@pytest.mark.parametrize("judged", [(), *itertools.chain(*(itertools.combinations((1, 2, 3), n) for n in (1, 2, 3)))])
def test_a_training_that_begins_anew_is_seen_whichever_of_its_saves_were_judged(tmp_path, monkeypatch, judged, saves):
    """It goes on while others of its saves are read. What is still on record of a name tells nothing of what was saved
    there since."""
    notes = PassNotes()
    for epoch in (1, 2, 3):
        numbered(tmp_path, epoch)
        reconcile(look(str(tmp_path)), notes)
    view = look(str(tmp_path))
    went_back_to = content_of(next(known_good_candidates(view)))
    lying = {checkpoint.signature for checkpoint in view.checkpoints}
    monkeypatch.setattr(trainer_saves, "SEED", 1000)
    for epoch in range(1, saves + 1):
        numbered(tmp_path, epoch)
        os.utime(tmp_path / f"model_{epoch * 10}_steps.pt", ns=(2 * 10**18 + epoch * 10**9,) * 2)
    for epoch in judged:
        view = look(str(tmp_path))
        verify_checkpoint(view, view.checkpoint(f"model_{epoch * 10}_steps.pt"))
    told, sick = find_fresh_start(look(str(tmp_path)), went_back_to, lying)
    assert told == (1 in judged)
    assert (sick is not None) == told
    reconcile(look(str(tmp_path)), notes)
    assert find_fresh_start(look(str(tmp_path)), went_back_to, lying)[1] is not None
