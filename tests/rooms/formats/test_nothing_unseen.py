"""What a file holds is looked at, wherever it lies and whatever it is called."""

from __future__ import annotations

import io
import json
import math
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from support.format_files import pickled, scan_of, structure_of, torch_bytes

from ckptguard.formats import Structure
from ckptguard.formats.pickle.constants import PickleProblem
from ckptguard.formats.pickle.machine import BUDGET, read_pickle
from ckptguard.layouts.roles import assign_roles
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Severity
from ckptguard.verification.target import Selection, verify_target

NAN = float("nan")
WORDS = ["scaler", "best_head", "data", "metrics", "config", "scheduler", "amp", "callbacks", "numpy", "cuda_rng"]


def roles(structure: Structure, name: str) -> dict[str, str]:
    """The role of each tensor."""
    given = assign_roles(name, structure.tensors, containers=structure.containers)
    return dict(zip((t.name for t in structure.tensors), given, strict=True))


@pytest.mark.parametrize("name", ["net-5.pt", "pytorch_model.bin", "model-5.pt"])
def test_a_flat_state_dict_is_all_weights(tmp_path: Path, name: str) -> None:
    """Submodules may be called what they like, and may have state of their own beside tensors."""
    state: dict[str, object] = {f"{word}.weight": torch.ones(2, 2) for word in WORDS}
    state |= {"logit_scale": torch.tensor(1.0), "scaler._extra_state": {"a": torch.ones(1)}}
    found = roles(structure_of(tmp_path, name, torch_bytes(state)), name)
    assert set(found.values()) == {"model"}
    assert len(found) == len(WORDS) + 2


def test_roles_come_from_real_containers(tmp_path: Path) -> None:
    """A top-level container states a role; a like-named one inside the model does not."""
    state = {
        "model": {"scaler": {"w": torch.ones(2)}, "data.w": torch.ones(2)},
        "optimizer": {"state": [torch.ones(2)]},
        "callbacks": {"best": torch.tensor(math.inf)},
        "best": torch.tensor(math.inf),
        "scaler": torch.ones(2, 2),
        "rng_state": torch.arange(3, dtype=torch.uint8),
    }
    structure = structure_of(tmp_path, "net-5.pt", torch_bytes(state))
    assert structure.containers == ("model", "optimizer", "callbacks")
    assert roles(structure, "net-5.pt") == {
        "model.scaler.w": "model",
        "model.data.w": "model",
        "optimizer.state.0": "optimizer",
        "callbacks.best": "other",
        "best": "other",
        "scaler": "model",
        "rng_state": "rng",
    }


def bad_leaves(structure: Structure) -> set[str]:
    """Names of numbers that are not finite."""
    return {leaf.name for leaf in structure.leaves if not math.isfinite(leaf.value)}


def test_a_bad_number_behind_many_is_listed(tmp_path: Path) -> None:
    """Thousands of numbers before it do not hide a NaN."""
    numbers = {"params": list(range(20_001)), "lr": {"$float": "nan"}}
    state = {"ckptguard_state": 1, "optimizer": {"groups": [numbers]}}
    own = structure_of(tmp_path, "step-000000005/state.json", json.dumps(state).encode())
    assert bad_leaves(own) == {"optimizer.groups.0.lr"}
    assert own.containers == ("optimizer",)
    nested = {"best": [[math.inf] for _ in range(20_001)], "optimizer": {"lr": NAN}}
    assert "optimizer.lr" in bad_leaves(structure_of(tmp_path, "n.pkl", pickled(nested)))


def test_more_bad_numbers_than_are_listed_are_a_problem(tmp_path: Path) -> None:
    """Where numbers that are not finite no longer find room, the file is not fine."""
    state = {"ckptguard_state": 1, "optimizer": [{"$float": "inf"}] * 20_001}
    assert structure_of(tmp_path, "step-000000005/state.json", json.dumps(state).encode()).problems
    assert structure_of(tmp_path, "n.pkl", pickled({f"k{i}": math.inf for i in range(20_001)})).problems


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Long doubles and structured floats are named; object arrays are walked; others hold no floats."""
    state = {
        "long": np.array([1, NAN], dtype=np.longdouble),
        "scalar": np.longdouble("nan"),
        "pairs": np.array([(NAN, 1.0)], dtype=[("a", "f4"), ("b", "f4")]),
        "masked": np.ma.masked_array([1.0, NAN], [0, 0]),
        "objects": np.array([NAN, {"lr": math.inf}], dtype=object),
        "texts": np.array(["a"]),
        "ints": np.arange(3),
        "empty": np.zeros(0, np.longdouble),
    }
    for protocol in (2, 4):
        structure = structure_of(tmp_path, "n.pkl", pickle.dumps(state, protocol))
        assert structure.unread == ("long", "scalar", "pairs", "masked")
        assert bad_leaves(structure) == {"objects.0", "objects.1.lr"}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("zipped", [True, False])
def test_bare_storages_are_tensors(tmp_path: Path, zipped: bool) -> None:
    """A storage that is a value itself is read as its type; one without a type is named."""
    typed = torch.full((4,), NAN).storage()
    state = {"typed": typed, "bytes": torch.ones(2).untyped_storage()}
    file = scan_of(tmp_path, "s.pt", torch_bytes(state, _use_new_zipfile_serialization=zipped)).files[0]
    assert file.structure.problems == ()
    assert [t.name for t in file.structure.tensors] == ["typed", "bytes"]
    assert file.numbers[0] is not None
    assert file.numbers[0].nan == 4
    assert file.structure.unread == ("bytes",)


def test_attributes_of_tensors_are_walked(tmp_path: Path) -> None:
    """What is set on a parameter, or on a tensor, is looked at as its own."""
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.scale = torch.full((2,), NAN)  # type: ignore[attr-defined]
    tensor = torch.ones(2)
    tensor.rate = NAN  # type: ignore[attr-defined]
    structure = structure_of(tmp_path, "a.pt", torch_bytes({"p": parameter, "t": tensor}))
    assert [t.name for t in structure.tensors] == ["p", "p.scale", "t"]
    assert bad_leaves(structure) == {"t.rate"}


def test_what_is_shared_too_often_is_named(tmp_path: Path) -> None:
    """A part that is not looked at again under yet another name is not passed over silently."""
    part = {"w": [torch.ones(1)]}
    assert structure_of(tmp_path, "s.pt", torch_bytes([part] * 8)).unread == ()
    assert structure_of(tmp_path, "s.pt", torch_bytes([part] * 9)).unread == ("8",)
    betas = (0.9, 0.999)
    assert structure_of(tmp_path, "b.pt", torch_bytes([{"betas": betas} for _ in range(50)])).unread == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("start", [0, 3])
def test_views_count_only_what_they_reach(tmp_path: Path, dtype: torch.dtype, start: int) -> None:
    """NaN in columns that a view leaves out are nobody's; those inside it are counted exactly, over many chunks."""
    base = torch.full((30_000, 24), NAN).to(dtype)
    view = base[:, start : start + 4]
    view[:] = 1
    base[0, start] = 2
    components = 2 if dtype.is_complex else 1

    def numbers() -> tuple[int, int, int | None, float] | None:
        found = scan_of(tmp_path, "v.pt", torch_bytes({"v": view.permute(1, 0)})).files[0].numbers[0]
        return found and (found.count, found.nan, found.first_bad, found.largest)

    count = 120_000 * components
    assert numbers() == (count, 0, None, 2.0)
    view[29_999, 2] = NAN
    nan, first_bad = int(torch.view_as_real(view).isnan().sum()) if components == 2 else 1, 119_998 * components
    assert numbers() == (count, nan, first_bad, 2.0)


def test_views_that_cannot_be_told_apart_stay_suspected(tmp_path: Path) -> None:
    """Where dimensions overlap and still leave gaps, what is spanned counts."""
    base = torch.ones(40)
    base[2] = NAN
    view = torch.as_strided(base, (2, 5, 3), (1, 4, 6))
    assert 2 not in {i + 4 * j + 6 * k for i in range(2) for j in range(5) for k in range(3)}
    found = scan_of(tmp_path, "v.pt", torch_bytes({"v": view})).files[0].numbers[0]
    assert found is not None
    assert found.nan == 1


def test_a_bin_file_of_another_kind_is_opaque(tmp_path: Path) -> None:
    """Token files and vocabularies are no tensors; damaged or promised ones stay a problem."""
    data = b"hello world, this is no tensor file"
    for name in ("vocab.bin", "train.bin"):
        structure = structure_of(tmp_path, name, data)
        assert (structure.format, structure.problems) == ("opaque", ())
        assert "unrecognised" in structure.metadata
        assert structure_of(tmp_path, name, b"").truncated
    for name in (
        "pytorch_model-00001-of-00002.bin",
        "adapter_model.bin",
        "optimizer.bin",
        "ema.bin",
        "net-5.safetensors",
    ):
        assert structure_of(tmp_path, name, data).problems
    damaged = b"\0" + torch_bytes({"w": torch.ones(2)})[1:]
    assert structure_of(tmp_path, "net-5.bin", damaged).problems


def test_verdicts_on_what_roles_and_forms_hid(tmp_path: Path) -> None:
    """NaN in a submodule called scaler is an error; what could not be read is a warning that names it."""
    weights = {"a.weight": torch.randn(3, 3), "scaler.weight": torch.full((2, 2), NAN)}
    torch.save(weights, tmp_path / "flat.pt")
    torch.save({"model": {"w": torch.randn(3, 3)}, "m": np.longdouble("nan")}, tmp_path / "long.pt")
    found = {}
    for name in ("flat.pt", "long.pt"):
        report = verify_target(str(tmp_path / name), Settings(settle=0), Selection(record=False))
        [checked] = report.checkpoints
        found[name] = {(f.severity, f.tensor) for f in checked.findings if f.check == "finite"}
    assert found == {
        "flat.pt": {(Severity.ERROR, "scaler.weight")},
        "long.pt": {(Severity.WARNING, "m")},
    }


FLOODS = {
    "nested lists": b"\x80\x02" + b"]" * 3_000_000,
    "marks": b"(" * 6_000_000,
    "memo": b"\x80\x04N" + b"\x94" * 4_000_000,
    "dicts": b"\x80\x02(" + b"}" * 3_000_000 + b"l.",
    "nothing much": b"N0" * 7_000_000 + b"N.",
    "wide texts": b"\x80\x02(" + (b"X\xe8\x03\x00\x00" + "\U0001f600".encode() + b"a" * 996) * 60_000 + b"l.",
}


@pytest.mark.parametrize("kind", sorted(FLOODS))
def test_a_pickle_that_floods_memory_is_refused(kind: str) -> None:
    """Few bytes that would become very many objects, or very large texts, end in a problem."""
    with pytest.raises(PickleProblem, match=r"(more values|longer texts) than ckptguard reads"):
        read_pickle(FLOODS[kind])


def test_a_hundred_thousand_tensors_are_read(tmp_path: Path) -> None:
    """The budget has room for a model and far more tensors than any has."""
    names = [f"model.layers.{i}.self_attn.q_proj.weight" for i in range(1000)]
    data = torch_bytes({name: torch.zeros(1) for name in names})
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        [record] = [n for n in archive.namelist() if n.endswith("data.pkl")]
        assert read_pickle(archive.read(record)).cost * 100 < BUDGET


def test_many_pickles_share_one_budget(tmp_path: Path) -> None:
    """A file of pickle after pickle costs no more than one."""
    one = b"N0" * 2_500_000 + b"N."
    assert structure_of(tmp_path, "m.pkl", one * 2).problems == ()
    assert structure_of(tmp_path, "m.pkl", one * 3).not_understood
    numbers = b"\x80\x02((" + b"K\x01" * 60 + b"tq\x00" + b"h\x00" * 900 + b"l."
    assert structure_of(tmp_path, "n.pkl", numbers * 10).problems == ()
    assert structure_of(tmp_path, "n.pkl", numbers * 60).not_understood
