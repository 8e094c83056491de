"""Which tensor is which: names within roles, files, pieces and prefixes."""

import pytest

from ckptguard.formats.structure import TensorPlace
from ckptguard.inspect.match_tensors import match_tensors
from ckptguard.inspect.tensor_table import Contents, HeldTensor, TensorSource
from ckptguard.layouts import Checkpoint
from ckptguard.storage import open_storage


@pytest.fixture
def contents(tmp_path):
    """A checkpoint's contents, of (name, role, file, shape) with defaults from the right."""

    def make(*tensors, step=None):
        held = []
        for given in tensors:
            given = (given,) if isinstance(given, str) else given
            name, role, file, shape = (*given, *("model", "f", (2,))[len(given) - 1 :])
            held.append(HeldTensor(name, role, file, file, TensorPlace(name, "float32", shape, 0), 0, 8, ""))
        checkpoint = Checkpoint(path="c", layout="folder", series="c", step=step, entries=())
        return Contents(TensorSource("c", open_storage(tmp_path), checkpoint), tuple(held), (), "read")

    return make


def names(matching):
    """Pairs, removed and added by name."""
    return (
        sorted((a.name, b.name) for a, b in matching.pairs),
        sorted(t.name for t in matching.removed),
        sorted(t.name for t in matching.added),
    )


def test_names_pair_within_their_role(contents):
    """A weight is not the optimizer's state of the same name."""
    a = contents("w", ("w", "optimizer"), "old")
    b = contents("w", ("w", "ema"), "new")
    matching = match_tensors(a, b)
    assert names(matching) == ([("w", "w")], ["old", "w"], ["new", "w"])


def test_one_of_each_rank_pairs_by_file(contents):
    """Equal names in several files belong together by the files' names, in which the step is open."""
    a = contents(*(("w", "model", f"global_step500/mp_rank_0{r}.pt") for r in range(3)), step=500)
    b = contents(*(("w", "model", f"global_step600/mp_rank_0{r}.pt") for r in (1, 0)), step=600)
    matching = match_tensors(a, b)
    assert sorted((x.file[-13:], y.file[-13:]) for x, y in matching.pairs) == [
        ("mp_rank_00.pt", "mp_rank_00.pt"),
        ("mp_rank_01.pt", "mp_rank_01.pt"),
    ]
    assert [t.file[-5:] for t in matching.removed] == ["02.pt"]


@pytest.mark.parametrize(("a", "b"), [("", "module."), ("module.", ""), ("model.", "module."), ("", "x.y.")])
def test_a_mere_prefix_is_said(contents, a, b):
    """All names gained, lost or changed a prefix: they are paired, and the prefix is told."""
    left = contents(*(f"{a}layers.{n}.weight" for n in range(12)), f"{a}gone")
    right = contents(*(f"{b}layers.{n}.weight" for n in range(12)))
    matching = match_tensors(left, right)
    assert len(matching.pairs) == 12
    assert [(r.role, r.a, r.b, r.tensors) for r in matching.renamings] == [("model", a, b, 12)]
    assert [t.name for t in matching.removed] == [f"{a}gone"]


def test_other_layers_are_no_prefix(contents):
    """Layers that were replaced by others of other names or shapes stay removed and added."""
    other_shape = match_tensors(
        contents("q.weight", "q.bias"),
        contents(("k.weight", "model", "f", (3,)), ("k.bias", "model", "f", (3,))),
    )
    assert names(other_shape) == ([], ["q.bias", "q.weight"], ["k.bias", "k.weight"])
    single = match_tensors(contents("q.weight"), contents("k.weight"))
    assert names(single) == ([], ["q.weight"], ["k.weight"])
    grown = match_tensors(contents("l.0.w", "l.1.w"), contents("l.0.w", "l.1.w", "l.2.w", "l.3.w"))
    assert grown.renamings == []
    assert [t.name for t in grown.added] == ["l.2.w", "l.3.w"]


def test_pieces_pair_if_they_agree(contents):
    """Pieces of a distributed checkpoint pair by their places in the whole."""
    pieces = ("w[0:4, 0:8]", "w[4:8, 0:8]", "v[0:2]")
    matching = match_tensors(contents(*pieces), contents(*reversed(pieces)))
    assert len(matching.pairs) == 3
    assert matching.recut == []


@pytest.mark.parametrize("others", [("w[0:2]", "w[2:8]"), ("w[0:4]", "w[4:6]", "w[6:8]"), ("w",)])
def test_pieces_cut_in_another_way_are_neither_added_nor_removed(contents, others):
    """A tensor that both hold, in pieces that do not agree, cannot be compared; others can."""
    matching = match_tensors(contents("w[0:4]", "w[4:8]", "v"), contents(*others, "v"))
    assert names(matching) == ([("v", "v")], [], [])
    [(left, right)] = matching.recut
    assert ([t.name for t in left].sort(), len(right)) == (None, len(others))


def test_many_names_are_matched_quickly(contents):
    """A hundred thousand renamed tensors with long names take no quadratic time."""
    stems = [f"model.layers.{n // 10}.block.{n % 10}.weight" for n in range(100_000)]
    matching = match_tensors(contents(*stems), contents(*(f"module.{s}" for s in stems)))
    assert len(matching.pairs) == 100_000
