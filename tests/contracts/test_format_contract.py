"""What every format's reader must keep. A new format is a row of `CASES` that says how its files are made."""

from __future__ import annotations

import io
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from blake3 import blake3
from support.container_files import baselines_files, gguf_bytes, hdf5_bytes, keras_zip, nemo_tar, zip_of
from support.format_files import FLOATS, pickled, safetensors_bytes, scan_of, some_tensors, structure_of, torch_bytes

from ckptguard.formats import format_of
from ckptguard.formats.table import FIRST_BYTES
from ckptguard.scan import ScanOptions


class Case(NamedTuple):
    """A format, the name of a file, and what the real writer makes of something small."""

    format: str
    name: str
    make: Callable[[], bytes]


class Tensors(NamedTuple):
    """The name of a file, and what the real writer makes of tensors."""

    name: str
    write: Callable[[dict[str, torch.Tensor]], bytes]


def arrays(save: Callable[..., None], *given: np.ndarray, **named: object) -> bytes:
    """What numpy writes."""
    buffer = io.BytesIO()
    save(buffer, *given, **named)
    return buffer.getvalue()


def sb3_zip(how: int, begin: int = 0) -> bytes:
    """What Stable-Baselines3 writes."""
    return zip_of(baselines_files({"mlp.weight": torch.ones(3, 2)})[begin:], how)


TENSORS = {
    "safetensors": Tensors("model.safetensors", safetensors_bytes),
    "torch_zip": Tensors("model.pt", torch_bytes),
    "torch_legacy": Tensors("old.pth", lambda tensors: torch_bytes(tensors, _use_new_zipfile_serialization=False)),
}
W, NPZ = np.arange(20.0).reshape(4, 5), "step_100.npz"
ENCODER, KERNEL = {"encoder.weight": torch.ones(3, 2)}, np.ones((2, 3), np.float32)
# Files that an older version of ours takes for mere bytes.
CONTAINERS = {
    "zip": Case("zip", "rl_model_500_steps.zip", lambda: sb3_zip(zipfile.ZIP_STORED)),
    "deflated zip": Case("zip", "rl_model_500_steps.zip", lambda: sb3_zip(zipfile.ZIP_DEFLATED, 2)),
    "tar": Case("tar", "asr.nemo", lambda: nemo_tar(ENCODER)),
    "compressed tar": Case("tar", "asr.nemo", lambda: nemo_tar(ENCODER, compressed=True)),
    "gguf": Case(
        "gguf",
        "model-f16.gguf",
        lambda: gguf_bytes({"a": np.ones((4, 8), np.float32), "b": np.ones(16, np.float16)}),
    ),
    "hdf5": Case(
        "hdf5",
        "ckpt-05.weights.h5",
        lambda: hdf5_bytes({"layers/dense/vars/0": KERNEL, "optimizer/vars/0": np.asarray(3)}),
    ),
    "keras": Case("zip", "model.05.keras", lambda: keras_zip(KERNEL)),
}
CASES = {
    **{name: Case(name, t.name, lambda t=t: t.write(some_tensors())) for name, t in TENSORS.items()},
    "npy": Case("npy", "weights.npy", lambda: arrays(np.save, np.arange(20, dtype=">f4").reshape(4, 5))),
    "npz": Case("npz", NPZ, lambda: arrays(np.savez, w=W, step=np.int64(100), none=np.zeros((0, 2)))),
    "deflated npz": Case("npz", NPZ, lambda: arrays(np.savez_compressed, w=W, step=np.int64(100))),
    "pickle": Case("pickle", "random_states_0.pkl", lambda: pickled({"lr": 0.1, "seen": [1, 2, 3], "name": "run"}, 4)),
    "hf_index": Case(
        "hf_index",
        "model.safetensors.index.json",
        lambda: b'{"metadata": {"total_size": 8}, "weight_map": {"w": "model-00001-of-00002.safetensors"}}',
    ),
    "trainer_state": Case(
        "trainer_state",
        "trainer_state.json",
        lambda: b'{"global_step": 8, "log_history": [{"loss": 0.0, "grad_norm": NaN, "step": 8}]}',
    ),
    "ckptguard_state": Case(
        "ckptguard_state",
        "step-000000500/state.json",
        lambda: b'{"ckptguard_state": 1, "optimizer": {"lr": 0.1, "scale": {"$float": "inf"}}, "other": {"x": 1}}',
    ),
    **CONTAINERS,
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    """Each format."""
    return CASES[request.param]


@pytest.fixture(params=TENSORS)
def tensors(request: pytest.FixtureRequest) -> Tensors:
    """Each format that holds tensors."""
    return TENSORS[request.param]


def test_the_table_finds_the_format(case: Case) -> None:
    """Name and first bytes lead to this format's row."""
    assert format_of(case.name, case.make()[:FIRST_BYTES]).name == case.format


def test_a_valid_file_has_no_problems(tmp_path: Path, case: Case) -> None:
    """What the real writer makes raises no alarm."""
    structure = structure_of(tmp_path, case.name, case.make())
    assert (structure.format, structure.problems, structure.truncated) == (case.format, (), False)


def test_every_truncation_is_a_problem(tmp_path: Path, case: Case) -> None:
    """A file cut anywhere is never whole."""
    data = case.make()
    if case.name.endswith("steps.zip"):  # of its first bytes nothing says what it is
        for length in [*range(400), *range(400, len(data), 17), len(data) - 1]:
            structure = structure_of(tmp_path, case.name, data[:length])
            assert structure.truncated if length > 80 else structure.problems or structure.format == "opaque", length
        return
    for length in range(len(data)):
        assert structure_of(tmp_path, case.name, data[:length]).problems, f"cut to {length} bytes"


def test_a_trailing_byte_is_a_problem(tmp_path: Path, case: Case) -> None:
    """Nothing may stand behind the file's own structure."""
    structure = structure_of(tmp_path, case.name, case.make() + b"x")
    assert structure.problems
    assert not structure.truncated


def test_changed_bytes_never_raise(tmp_path: Path, case: Case) -> None:
    """Any damage ends in a Structure, and spans stay inside the file, in order and apart."""
    data = case.make()
    seeds = random.Random(20)
    for turn in range(600 if case.format in ("gguf", "hdf5") else 300):
        damaged = bytearray(data)
        for _ in range(seeds.choice((1, 1, 1, 5))):
            position = seeds.randrange(len(damaged))
            damaged[position] = seeds.randrange(256) if turn % 2 else damaged[position] ^ 1 << seeds.randrange(8)
        structure = structure_of(tmp_path, case.name, bytes(damaged))
        end = 0
        for span in structure.spans:
            assert end <= span.offset
            end = span.offset + span.length
        assert end <= len(damaged)


def test_digests_do_not_depend_on_how_the_file_is_read(tmp_path: Path, case: Case) -> None:
    """One thread or several, with or without other sums: the same digests."""
    data = case.make()
    (tmp_path / case.name).parent.mkdir(exist_ok=True)
    first = scan_of(tmp_path, case.name, data).files[0]
    second = scan_of(tmp_path, case.name, data, ScanOptions(workers=1, sums=("sha256",), md5=False)).files[0]
    assert first.md5 is not None
    assert (first.envelope, first.span_digests) == (second.envelope, second.span_digests)


def test_the_tensor_table_is_the_writers(tmp_path: Path, tensors: Tensors) -> None:
    """Names, types, shapes and bytes are those that were saved."""
    saved = some_tensors()
    data = tensors.write(saved)
    structure = structure_of(tmp_path, tensors.name, data)
    found = {t.name: t for t in structure.tensors}
    assert set(found) == set(saved)
    for name, tensor in saved.items():
        place = found[name]
        assert (place.dtype, place.shape) == (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        raw = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        if place.span is None:
            assert raw == b""
            continue
        begin = structure.spans[place.span].offset + place.start * tensor.element_size()
        assert data[begin : begin + len(raw)] == raw
        assert place.stop - place.start == tensor.numel()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nan_is_found_where_it_is(tmp_path: Path, tensors: Tensors, dtype: torch.dtype) -> None:
    """Count and first index of NaN and infinities are exact in every float type."""
    values = torch.ones(101)
    values[17] = float("nan")
    values[40] = float("nan")
    infinities = dtype != torch.float8_e4m3fn
    if infinities:
        values[9] = float("inf")
        values[90] = float("-inf")
    file = scan_of(tmp_path, tensors.name, tensors.write({"before": torch.ones(3), "w": values.to(dtype)})).files[0]
    numbers = dict(zip((t.name for t in file.structure.tensors), file.numbers, strict=True))
    found = numbers["w"]
    assert found is not None
    assert (found.count, found.nan, found.posinf, found.neginf) == (101, 2, int(infinities), int(infinities))
    assert found.first_bad == (9 if infinities else 17)
    assert found.largest == 1.0
    assert found.single_finite
    assert not found.constant
    assert numbers["before"] is not None
    assert numbers["before"].nan == 0


def test_damage_in_a_tensor_changes_its_span_digest_alone(tmp_path: Path, tensors: Tensors) -> None:
    """A flipped bit in stored elements is seen in that span's digest, and nowhere else."""
    data = tensors.write(some_tensors())
    good = scan_of(tmp_path, tensors.name, data).files[0]
    place = next(t for t in good.structure.tensors if t.name == "float32")
    assert place.span is not None
    damaged = bytearray(data)
    damaged[good.structure.spans[place.span].offset + 1] ^= 4
    bad = scan_of(tmp_path, tensors.name, bytes(damaged)).files[0]
    assert bad.envelope == good.envelope
    differing = [
        i for i, pair in enumerate(zip(good.span_digests, bad.span_digests, strict=True)) if len(set(pair)) > 1
    ]
    assert differing == [place.span]


@pytest.mark.parametrize("name", CONTAINERS)
def test_the_digest_is_that_of_all_bytes(tmp_path: Path, name: str) -> None:
    """So every version says the same of the same bytes."""
    data = CONTAINERS[name].make()
    assert scan_of(tmp_path, CONTAINERS[name].name, data).files[0].envelope == blake3(data).hexdigest()


def test_a_wrong_crc_is_a_problem_of_its_tensor(tmp_path: Path) -> None:
    """torch never looks at the CRC that it writes; we do, and name the tensor."""
    data = bytearray(torch_bytes(some_tensors()))
    structure = structure_of(tmp_path, "model.pt", bytes(data))
    place = next(t for t in structure.tensors if t.name == "ids")
    assert place.span is not None
    data[structure.spans[place.span].offset] ^= 1
    file = scan_of(tmp_path, "model.pt", bytes(data)).files[0]
    assert [p.tensor for p in file.structure.problems] == ["ids"]
