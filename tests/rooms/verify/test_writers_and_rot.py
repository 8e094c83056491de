"""A writer or rot? What torch.save writes is a new generation, however little differs; a flipped bit never is."""

import os
import shutil
import tempfile
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.runs import save_file
from support.views import look

from ckptguard.records.run import open_run
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.verdict import Outcome, Severity
from ckptguard.verify import collect_evidence
from ckptguard.verify.checkpoint import verify_checkpoint
from ckptguard.verify.user_decisions import accept

SOME = settings(max_examples=25, deadline=None, database=None, suppress_health_check=list(HealthCheck))
NAMES = ("ckpt.pt", "net-5.pt")


def training(seed=0):
    """What nanoGPT saves: weights, moments, a counter, a number beside."""
    generator = torch.Generator().manual_seed(seed)
    model = {f"h.{n}.weight": torch.randn(6, 5, generator=generator) for n in range(5)}
    moments = {n: {"step": torch.tensor(7.0), "exp_avg": torch.rand(6, 5, generator=generator)} for n in range(5)}
    optimizer = {"state": moments, "param_groups": [{"lr": 0.1, "params": list(range(5))}]}
    return {"model": model, "optimizer": optimizer, "iter_num": 7, "best_val_loss": 1.5}


def judged(root):
    """(id, outcome) of the one checkpoint of a run, verified now."""
    view = look(open_run(str(root)))
    [checkpoint] = view.checkpoints
    checked = verify_checkpoint(view, checkpoint)
    return str(checked.id).rpartition(".")[2], checked.outcome


def write(path, save, how, before):
    """Save over a file as trainers do: in place, or beside and renamed; perhaps under its old time."""
    if how == "in place":
        save(path)
    else:
        save(path.with_name("tmp"))
        os.replace(path.with_name("tmp"), path)
    stamp = before.st_mtime_ns + (0 if how == "renamed, time kept" else 10**9)
    os.utime(path, ns=(stamp, stamp))


@SOME
@given(
    name=st.sampled_from(NAMES),
    tensors=st.sets(st.integers(0, 9)),
    loss=st.sampled_from([1.5, 1.25]),
    counted=st.integers(0, 2),
    how=st.sampled_from(["in place", "renamed", "renamed, time kept"]),
)
def test_whatever_a_writer_changes_makes_a_new_generation(name, tensors, loss, counted, how):
    """Equal bytes are the same generation, any others the next one; both are GOOD."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        torch.save(training(), path)
        assert judged(folder) == ("1", Outcome.GOOD)
        before, state = (path.read_bytes(), path.stat()), training()
        for number in tensors:
            moment = state["optimizer"]["state"][number % 5]["exp_avg"]
            (state["model"][f"h.{number}.weight"] if number < 5 else moment)[0, 0] += 0.1
        state |= {"best_val_loss": loss, "iter_num": 7 + counted}
        write(path, lambda place: torch.save(state, place), how, before[1])
        # The root folder in the archive is named by the file: that alone is no other content.
        alike = not tensors and loss == 1.5 and not counted
        if alike and path.read_bytes() != before[0]:
            return
        assert judged(folder) == ("1" if alike else "2", Outcome.GOOD)


@SOME
@given(
    kind=st.sampled_from(["torch", "safetensors"]),
    place=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 7),
    times=st.sampled_from(["kept", "new"]),
    moved=st.booleans(),
)
def test_a_flipped_bit_is_damage_wherever_it_is(kind, place, bit, times, moved):
    """In tensors, in the pickle, in padding that nobody reads; also under a new time or inode."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "net-5." + ("pt" if kind == "torch" else "safetensors"))
        torch.save(training(), path) if kind == "torch" else save_file(training()["model"], path)
        assert judged(folder) == ("1", Outcome.GOOD)
        data, before = bytearray(path.read_bytes()), path.stat()
        data[int(place * len(data))] ^= 1 << bit
        path.write_bytes(data)
        if moved:
            shutil.copy(path, path.with_name("tmp"))
            os.replace(path.with_name("tmp"), path)
        stamp = before.st_mtime_ns + (0 if times == "kept" else 10**9)
        os.utime(path, ns=(stamp, stamp))
        assert judged(folder) == ("1", Outcome.BAD)


@SOME
@given(data=st.data(), gone=st.booleans(), good=st.booleans())
def test_what_lies_in_an_empty_place_is_new(data, gone, good):
    """One tensor of a safetensors file differs: damage, unless it never was GOOD or a pass saw its place empty."""
    with tempfile.TemporaryDirectory() as folder:
        path, notes, state = Path(folder, "net-5.safetensors"), PassNotes(), training()["model"]
        first = {n: t.clone() for n, t in state.items()}
        if not good:
            first["h.0.weight"][1, 1] = float("nan")
        save_file(first, path)
        [checked] = reconcile(look(open_run(folder)), notes, assume_quiet=True).checked
        assert checked.outcome is (Outcome.GOOD if good else Outcome.BAD)
        before = path.stat()
        if gone:
            path.unlink()
            reconcile(look(open_run(folder)), notes, assume_quiet=True)
        state[f"h.{data.draw(st.integers(0, 4))}.weight"][0, 0] += 0.1
        save_file(state, path)
        os.utime(path, ns=(before.st_mtime_ns + 10**9,) * 2)
        [checked] = reconcile(look(open_run(folder)), notes, assume_quiet=True).checked
        expected = ("5.2", Outcome.GOOD) if gone or not good else ("5.1", Outcome.BAD)
        assert (str(checked.id), checked.outcome) == expected


@pytest.mark.parametrize("counter", [7, 8, 6])
def test_a_counter_that_rose_tells_of_a_writer(tmp_path, counter):
    """In the old format of torch.save nothing checks itself: one tensor differs."""
    path = tmp_path / "ckpt.pt"
    torch.save(training(), path, _use_new_zipfile_serialization=False)
    assert judged(tmp_path) == ("1", Outcome.GOOD)
    state = training()
    state["model"]["h.1.weight"] += 0.1
    state["iter_num"] = counter
    before = path.stat()
    torch.save(state, path, _use_new_zipfile_serialization=False)
    os.utime(path, ns=(before.st_mtime_ns + 10**9,) * 2)
    assert judged(tmp_path) == (("2", Outcome.GOOD) if counter == 8 else ("1", Outcome.BAD))


def test_a_counter_alone_tells_of_nothing(tmp_path):
    """A flipped bit in a number beside may make it larger."""
    folder = tmp_path / "checkpoint-5"
    folder.mkdir()
    save_file(training()["model"], folder / "model.safetensors")
    (folder / "trainer_state.json").write_text('{"global_step": 5}')
    assert judged(tmp_path) == ("1", Outcome.GOOD)
    (folder / "trainer_state.json").write_text('{"global_step": 7}')
    for file in folder.iterdir():
        os.utime(file, ns=(10**18, 10**18))
    assert judged(tmp_path) == ("1", Outcome.BAD)


def test_a_copy_of_another_step_is_damage_although_its_sums_are_right(tmp_path):
    """It would be taken for a step that it is not."""
    run = open_run(str(tmp_path))
    for step in (100, 200):
        torch.save(training(step), tmp_path / f"net-{step}.pt")
        assert verify_checkpoint(look(run), look(run).checkpoint(f"net-{step}.pt")).outcome is Outcome.GOOD
    shutil.copy(tmp_path / "net-100.pt", tmp_path / "net-200.pt")
    assert verify_checkpoint(look(run), look(run).checkpoint("net-200.pt")).outcome is Outcome.BAD


def test_what_an_older_version_sealed_is_judged_by_its_tensors(tmp_path, monkeypatch):
    """Its manifest does not say what the archive stated. Another tensor tells of a writer, another number does not."""
    path, real = tmp_path / "ckpt.pt", collect_evidence.manifest_file
    torch.save(training(), path)
    with monkeypatch.context() as older:
        older.setattr(collect_evidence, "manifest_file", lambda *a: msgspec.structs.replace(real(*a), checksums=""))
        assert judged(tmp_path) == ("1", Outcome.GOOD)
    state = training() | {"best_val_loss": 1.25}
    before = path.stat()
    for changed, expected in ((0, ("1", Outcome.BAD)), (1, ("2", Outcome.GOOD))):
        state["model"]["h.1.weight"][0, 0] += changed
        torch.save(state, path)
        os.utime(path, ns=(before.st_mtime_ns + 10**9,) * 2)
        assert judged(tmp_path) == expected


@pytest.mark.parametrize("change", ["head", "optimizer"])
def test_a_change_that_a_user_may_well_make_is_a_question(tmp_path, change):
    """Another head, another optimizer, under the one name: SUSPECT with no incident, until it is accepted."""
    run, path = open_run(str(tmp_path)), tmp_path / "ckpt.pt"
    torch.save(training(), path)
    assert judged(tmp_path) == ("1", Outcome.GOOD)
    for seed, outcome in ((1, Outcome.SUSPECT), (2, Outcome.GOOD)):
        state = training(seed)
        if change == "head":
            state["model"]["h.4.weight"] = torch.randn(9, 5)
        else:
            state["optimizer"] = {"state": {}, "param_groups": [{"lr": 0.1, "params": list(range(5))}]}
        torch.save(state, path)
        os.utime(path, ns=(10**18 + seed, 10**18 + seed))
        checked = verify_checkpoint(look(run), look(run).checkpoint("ckpt.pt"))
        assert checked.outcome is outcome
        if outcome is Outcome.SUSPECT:
            [finding] = [f for f in checked.findings if f.severity is Severity.SICKNESS]
            assert finding.check == "schema"
            assert accept(look(run), "ckpt.pt").outcome is Outcome.GOOD
