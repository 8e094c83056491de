"""A writer or rot? What torch.save writes is a new generation, however little differs; a flipped bit never is."""

import os
import shutil
import tempfile
from functools import partial
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
from ckptguard.verification import collect_evidence
from ckptguard.verification.checkpoint import verify_checkpoint
from ckptguard.verification.user_decisions import accept

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


FEW = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}


@st.composite
def few_tensors(draw):
    """What a small adapter or an embedding holds: one to three tensors, from one element on."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 15, 16, 31, 40, 768, 5000, 70_000]), min_size=1, max_size=3))
    dtype, generator = FEW[draw(st.sampled_from(sorted(FEW)))], torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return {f"t{n}": torch.randn(size, generator=generator).to(dtype) for n, size in enumerate(sizes)}


def trained(state, names, seed):
    """The same after an update that changes each element of these tensors."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: t + ((torch.rand(t.shape, generator=generator) + 0.5) * (t.abs() + 0.1)).to(t.dtype)
        if name in names
        else t
        for name, t in state.items()
    }


def judged_after(folder, path, write_anew, how):
    """The first verdict's content, saved over somehow; then what the second verdict says."""
    assert judged(folder) == ("1", Outcome.GOOD)
    before = path.stat()
    write(path, write_anew, how, before)
    view = look(open_run(str(folder)))
    checked = verify_checkpoint(view, view.checkpoints[0])
    return str(checked.id).rpartition(".")[2], checked.outcome, checked.findings


@settings(SOME, max_examples=40)
@given(
    state=few_tensors(),
    data=st.data(),
    how=st.sampled_from(["in place", "renamed"]),
    what=st.sampled_from(["ok", "nan"]),
)
def test_a_save_of_few_tensors_is_never_damage(state, data, how, what):
    """It is the next generation: GOOD from 16 elements on, else a question. With NaN it is sick, and no damage."""
    names = data.draw(st.sets(st.sampled_from(sorted(state)), min_size=1))
    changed = sum(min(state[name].numel(), 32) for name in names)
    if changed == 1 < sum(t.numel() for t in state.values()):
        return  # one element beside others: so does a flipped bit
    anew = trained(state, names, 5)
    if what == "nan":
        anew |= {name: torch.full_like(state[name], float("nan")) for name in names}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "learned_embeds.safetensors")
        save_file(state, path)
        generation, outcome, findings = judged_after(folder, path, lambda place: save_file(anew, place), how)
        assert generation == "2"
        if what == "nan":
            assert outcome is Outcome.BAD
            assert "finite" in {f.check for f in findings}
            assert not {"digests", "structure"} & {f.check for f in findings}
        elif changed >= 16:
            assert outcome is Outcome.GOOD
        else:
            [question] = [f for f in findings if f.severity is Severity.SICKNESS]
            assert outcome is Outcome.SUSPECT
            assert "ckptguard clear" in question.message


@pytest.mark.parametrize("dtype", sorted(FEW))
@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 5, 3), (4, 4, 7), (1, 2, 3)])
def test_three_tensors_of_a_few_elements_are_no_proof_of_a_writer(tmp_path, sizes, dtype):
    """A torn write of a few words changes all of them."""
    state = {f"t{n}": torch.linspace(1, 2, size).to(FEW[dtype]) for n, size in enumerate(sizes)}
    path = tmp_path / "scales.safetensors"
    save_file(state, path)
    write_anew = partial(save_file, trained(state, state, 5))
    generation, outcome, _ = judged_after(tmp_path, path, write_anew, "in place")
    assert (generation, outcome) == ("2", Outcome.SUSPECT)


@settings(SOME, max_examples=80)
@given(
    state=few_tensors(),
    kind=st.sampled_from(["bit", "byte", "zeros", "ones", "noise", "zeroed end", "cut", "old end", "shifted"]),
    begin=st.floats(0, 1, exclude_max=True),
    length=st.one_of(st.integers(1, 64), st.sampled_from([512, 4096, 65536])),
    renamed=st.booleans(),
    seed=st.integers(0, 99),
)
def test_harm_to_few_tensors_is_never_good(state, kind, begin, length, renamed, seed):
    """One place, whatever it holds now: BAD. Where nothing in the file is as it was, a question at most."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "adapter.safetensors")
        save_file(state, path)
        data = bytearray(path.read_bytes())
        first = len(data) - sum(t.numel() * t.element_size() for t in state.values())
        at = first + int(begin * (len(data) - first))
        end, old = min(at + length, len(data)), bytes(data)
        if kind == "bit":
            data[at] ^= 1 << seed % 8
        elif kind == "byte":
            data[at] ^= 1 + seed % 255
        elif kind in ("zeros", "ones"):
            data[at:end] = bytes([255 * (kind == "ones")]) * (end - at)
        elif kind == "noise":
            data[at:end] = (
                torch.randint(0, 256, (end - at,), generator=torch.Generator().manual_seed(seed))
                .to(torch.uint8)
                .numpy()
                .tobytes()
            )
        elif kind == "zeroed end":
            data[at:] = bytes(len(data) - at)
        elif kind == "cut":
            del data[at:]
        elif kind == "old end":  # saved over in place, and not to its end
            save_file(trained(state, state, 5), path)
            data[:at] = path.read_bytes()[:at]
        else:
            data[at:end] = old[max(at - 512, first) : max(at - 512, first) + end - at]
        path.write_bytes(old)
        nearly_all = end - at > 0.75 * (len(data) - first) if kind == "shifted" else at > len(old) - len(old) // 16
        if bytes(data) == old or (kind in ("shifted", "old end") and nearly_all):
            return  # but for less than a piece it is another content
        how = "renamed" if renamed else "in place"
        _, outcome, _ = judged_after(folder, path, lambda place: place.write_bytes(data), how)
        if outcome is not Outcome.BAD:
            touched = sum(n >= len(data) or data[n] != old[n] for n in range(len(old)))
            one_element = sum(t.numel() for t in state.values()) == 1
            unclear = one_element or (touched <= 128 and kind not in ("bit", "byte")) or kind in ("old end", "shifted")
            assert (outcome, unclear) == (Outcome.SUSPECT, True)


@pytest.mark.parametrize("tensors", [1, 4])
def test_rows_that_are_always_zero_are_no_lost_page(tmp_path, tensors):
    """Padding of a vocabulary, or a mask: it was so before, and the rest changes."""
    path = tmp_path / "embeds.safetensors"
    for seed in (1, 2):
        table = torch.randn(64, 32, generator=torch.Generator().manual_seed(seed))
        table[10:12] = table[40:50] = 0
        save_file({f"t{n}": table + (table != 0) * n for n in range(tensors)}, path)
        os.utime(path, ns=(10**18, 10**18 + seed))
        generation, outcome = judged(tmp_path)
    assert generation == "2"
    assert outcome is (Outcome.GOOD if tensors > 2 else Outcome.SUSPECT)


@pytest.mark.parametrize(("sizes", "outcome"), [((40,), Outcome.GOOD), ((4, 4, 4), Outcome.SUSPECT)])
@pytest.mark.parametrize("how", ["in place", "renamed"])
def test_words_beside_few_tensors_are_saved_with_them(tmp_path, sizes, outcome, how):
    """A training started from scratch reaches the same step. Its trainer's JSON holds another loss, and no tensor."""
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        weights = {f"t{n}": torch.rand(size, generator=generator) + 1 for n, size in enumerate(sizes)}
        state = f'{{"global_step": 1, "best_metric": 0.{seed}}}'
        for name, save in (
            ("model.safetensors", partial(save_file, weights)),
            ("trainer_state.json", partial(Path.write_text, data=state)),
        ):
            path = folder / name
            if seed == 1:
                save(path)
            else:
                write(path, save, how, path.stat())
        generation, found = judged(tmp_path)
    assert (generation, found) == ("2", outcome)
