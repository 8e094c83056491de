"""diff: what two checkpoints differ in, whatever they are stored as."""

import math
import os

import pytest
import torch
from support.runs import QUICK, WRITERS, save_file, state_dict, write_sharded, write_torch

from ckptguard.errors import CouldNotTellError, NotFoundError, RefusedError
from ckptguard.inspect import diff as diff_module
from ckptguard.inspect.diff import diff
from ckptguard.runs.work import Work
from ckptguard.scan import compare as compare_module
from ckptguard.scan import scan_files
from ckptguard.verification.target import verify_target


def compare(a, b, **options):
    """The diff of two paths."""
    return diff(str(a), str(b), QUICK, **options)


def by_name(found):
    """Changes by the tensor's name."""
    return {c.name: c for c in found.changes}


@pytest.fixture
def saved(tmp_path):
    """Save a state as a file of its own."""

    def save(name, state):
        torch.save(state, tmp_path / name)
        return tmp_path / name

    return save


@pytest.mark.parametrize("kind", WRITERS)
def test_a_checkpoint_does_not_differ_from_another_form_of_itself(tmp_path, kind):
    """The same state in other files and formats has no differences."""
    name = WRITERS[kind](tmp_path / "x", 5, 7)
    write_torch(tmp_path / "y", 5, 7)
    found = compare(tmp_path / "x" / name, tmp_path / "y" / "net-5.pt")
    assert (found.same, found.changes) == (18, ())


def test_every_kind_of_change_is_told(saved):
    """Added, removed, reshaped, re-typed and changed tensors, and no other."""
    before, after = state_dict(1), state_dict(1)
    after["layers.0.query.weight"] = after["layers.0.query.weight"] * 1.01
    after["layers.1.query.weight"] = after["layers.1.query.weight"].half()
    after["layers.2.query.weight"] = after["layers.2.query.weight"][:, :5].clone()
    after["steps_seen"] += 1
    after["new"] = after.pop("embed.weight")[:1].clone()
    found = compare(saved("a.pt", before), saved("b.pt", after))
    assert {c.name: c.change for c in found.changes} == {
        "layers.0.query.weight": "changed",
        "layers.1.query.weight": "retyped",
        "layers.2.query.weight": "reshaped",
        "steps_seen": "changed",
        "new": "added",
        "embed.weight": "removed",
    }
    assert found.same == 13
    changed = by_name(found)
    assert changed["layers.0.query.weight"].difference.relative_l2 == pytest.approx(0.01, rel=1e-4)
    assert changed["steps_seen"].difference.differing == 1
    assert (changed["layers.1.query.weight"].a.dtype, changed["layers.1.query.weight"].b.dtype) == (
        "float32",
        "float16",
    )
    assert changed["layers.2.query.weight"].difference is None


def test_what_became_nan_comes_first_then_the_farthest(saved):
    """NaN and infinity outweigh any distance, in file order; distances descend."""
    before = {name: torch.ones(8) for name in "abcdef"}
    after = {name: t.clone() for name, t in before.items()}
    after["a"] += 1
    after["b"] += 5
    after["e"][1], after["f"][0] = math.inf, math.nan
    after["c"] += 0.5
    found = compare(saved("a.pt", before), saved("b.pt", after))
    assert [c.name for c in found.changes] == ["e", "f", "b", "a", "c"]
    first = found.changes[1].difference
    assert (first.became_nonfinite, first.first_nonfinite, first.nan_b) == (1, (0,), 1)


def test_equal_spans_are_not_read_for_values(tmp_path, run, root, monkeypatch):
    """By recorded digests alone: no tensor byte of two equal, sealed checkpoints is read."""
    write_torch(root, 100, 7)
    write_torch(root, 200, 7)
    verify_target(str(root), QUICK)
    scans = []

    def scanner(storage, keys, options, progress):
        scans.append(options.structure_only)
        return scan_files(storage, keys, options, progress)

    monkeypatch.delattr(compare_module, "compare")
    found = compare(root / "net-100.pt", root / "net-200.pt", work=Work(scanner=scanner))
    assert (found.same, found.changes) == (18, ())
    assert (found.a.digests, found.b.digests, str(found.a.id)) == ("recorded", "recorded", "100.1")
    assert scans == [True, True]


def test_a_file_that_changed_since_is_read(tmp_path, run, root):
    """Recorded digests count only for the file that was sealed."""
    for step in (100, 200):
        write_torch(root, step, 7)
    verify_target(str(root), QUICK)
    state = state_dict(7)
    state["embed.weight"][0, 0] += 1
    torch.save(state, root / "net-200.pt")
    found = compare(root / "net-100.pt", root / "net-200.pt")
    assert [c.name for c in found.changes] == ["embed.weight"]
    assert (found.a.digests, found.b.digests) == ("recorded", "read")


def test_tensors_that_share_a_storage_are_told_apart(saved):
    """Of several views of one storage only those with changed elements have changed."""
    base = torch.arange(20.0)
    other = base.clone()
    other[12] = -1
    views = {"low": slice(0, 10), "high": slice(10, 20), "all": slice(0, 20)}
    found = compare(
        saved("a.pt", {n: base[s] for n, s in views.items()}), saved("b.pt", {n: other[s] for n, s in views.items()})
    )
    assert sorted(c.name for c in found.changes) == ["all", "high"]
    assert by_name(found)["high"].difference.largest_index == (2,)


def test_a_prefix_of_all_names_is_said(saved):
    """What DistributedDataParallel does to names is one line, not a hundred."""
    state = state_dict(3)
    found = compare(saved("a.pt", state), saved("b.pt", {f"module.{k}": v for k, v in state.items()}))
    assert (found.same, found.changes) == (18, ())
    assert [(p.a, p.b, p.tensors) for p in found.prefixes] == [("", "module.", 18)]


def test_nested_states_match_by_role(saved):
    """The weights of a training state match those of a bare state dict; its optimizer is removed."""
    state = {"weight": torch.ones(2, 2), "bias": torch.ones(2)}
    optimizer = {"state": {0: {"exp_avg": torch.zeros(2, 2)}}, "param_groups": []}
    found = compare(saved("a.pt", {"model": state, "optimizer": optimizer}), saved("b.pt", state))
    assert found.same == 2
    assert [(c.role, c.change) for c in found.changes] == [("optimizer", "removed")]
    assert [(p.a, p.b) for p in found.prefixes] == [("model.", "")]


def test_remote_checkpoints_are_compared(tmp_path, saved):
    """A checkpoint in an object store compares with a local one."""
    import fsspec

    path = saved("net-1.pt", state_dict(1))
    store = fsspec.filesystem("memory")
    store.pipe_file("/diffs/net-2.pt", saved("net-2.pt", state_dict(2)).read_bytes())
    try:
        found = diff(str(path), "memory://diffs/net-2.pt", QUICK)
        assert found.same == 0
        assert found.counts["changed"] == 18
        assert diff("memory://diffs/net-2.pt", str(tmp_path / "net-2.pt"), QUICK).changes == ()
    finally:
        store.rm("/diffs", recursive=True)


def test_a_run_is_no_checkpoint(three, root):
    """A run, and a path where nothing is, are refused with a hint."""
    with pytest.raises(NotFoundError, match="is a run"):
        compare(root, root / "net-100.pt")
    with pytest.raises(NotFoundError):
        compare(root / "net-100.pt", root / "absent")


def test_a_file_without_tensors_cannot_be_compared(tmp_path, saved):
    """Neither good nor bad: there is nothing to compare."""
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CouldNotTellError, match="no tensors"):
        compare(saved("a.pt", state_dict(1)), tmp_path / "notes.txt")


@pytest.mark.parametrize("kept", [0, 10, 700])
def test_a_truncated_file_is_refused_as_bad(saved, kept):
    """What cannot be read for damage is a sentence, and bad."""
    whole = saved("a.pt", state_dict(1))
    broken = saved("b.pt", state_dict(1))
    os.truncate(broken, kept)
    with pytest.raises((RefusedError, CouldNotTellError)) as caught:
        compare(whole, broken)
    assert "b.pt" in caught.value.message


def test_a_damaged_shard_is_told_beside_what_the_others_say(tmp_path):
    """One shard that cannot be read leaves the others comparable, and is named."""
    for run in ("x", "y"):
        write_sharded(tmp_path / run, 5, 7)
    os.truncate(tmp_path / "y" / "sharded-5" / "model-00002-of-00003.safetensors", 40)
    found = compare(tmp_path / "x" / "sharded-5", tmp_path / "y" / "sharded-5")
    assert {(d.side, d.file) for d in found.damaged} == {("b", "model-00002-of-00003.safetensors")}
    assert found.same == 12
    assert found.counts["removed"] == 6


def test_the_limit_is_for_each_kind(saved):
    """At most so many changes of each kind are shown, the heaviest of them."""
    before = {f"w{i}": torch.ones(4) for i in range(9)}
    after = {f"w{i}": torch.ones(4) * (i + 1) for i in range(5)} | {"added": torch.ones(1)}
    found = compare(saved("a.pt", before), saved("b.pt", after))
    kept = diff_module.shown(found.changes, 2)
    assert [(c.name, c.change) for c in kept] == [
        ("w4", "changed"),
        ("w3", "changed"),
        ("added", "added"),
        ("w5", "removed"),
        ("w6", "removed"),
    ]


def test_sub_byte_types_are_only_told_to_differ(tmp_path):
    """Packed types are opaque: they differ or do not, and a note says why there is no distance."""
    for name, value in (("a", 1), ("b", 2)):
        packed = torch.full((4, 8), value, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
        save_file({"packed": packed, "plain": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    found = compare(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    [change] = found.changes
    assert (change.name, change.change) == ("packed", "unknown")
    assert change.note
