"""torch.distributed.checkpoint's folders, as torch writes them, whole and damaged."""

from __future__ import annotations

import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorProperties

from ckptguard.formats import Structure
from ckptguard.formats.dcp.chunks import flaw_in_cover
from ckptguard.layouts import find_checkpoints
from ckptguard.layouts.checkpoint import Gap
from ckptguard.layouts.dcp import dcp_gaps
from ckptguard.layouts.sharded import dcp_shard_gaps
from ckptguard.scan import Scan, scan_files
from ckptguard.storage import open_storage

FILE = "__0_0.distcp"


def state() -> dict[str, object]:
    """Nested, of several types, with an empty tensor, a transposed one and numbers."""
    return {
        "model": {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(4).bfloat16(), "e": torch.zeros(0, 4)},
        "optim": {"state": {"w": {"exp_avg": torch.full((4, 3), 0.5).t()}}, "param_groups": [{"lr": 0.25}]},
        "step": 7,
    }


def save(state: dict[str, object], folder: Path) -> None:
    """By one process alone; torch warns about that."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that torch wrote."""
    folder = tmp_path_factory.mktemp("dcp") / "step-7"
    save(state(), folder)
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(written, tmp_path / "step-7"))


def scan(folder: Path) -> Scan:
    """All its files."""
    return scan_files(open_storage(folder), sorted(p.name for p in folder.iterdir()))


def structure(folder: Path, name: str = FILE) -> Structure:
    """One of them."""
    found = scan_files(open_storage(folder), [name]).file(name)
    assert found is not None
    return found.structure


def gaps(folder: Path) -> list[Gap]:
    """What the folder lacks."""
    storage = open_storage(folder.parent)
    (checkpoint,) = find_checkpoints(storage.list("", recursive=True))
    structures = {f.entry.key: f.structure for f in scan_files(storage, checkpoint.files).files}
    return [*dcp_gaps(checkpoint, "", structures), *dcp_shard_gaps(checkpoint, structures)]


def change(folder: Path, edit: Callable[[Metadata], None]) -> None:
    """Rewrite ``.metadata``."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    edit(metadata)
    path.write_bytes(pickle.dumps(metadata))


def test_a_clean_folder(folder: Path) -> None:
    """No problems, no gaps; the schema is in .metadata, bytes and numbers in .distcp, under the same names."""
    found = scan(folder)
    schema, stored = (f.structure for f in found.files)
    assert (schema.format, stored.format) == ("dcp_metadata", "distcp")
    assert (schema.problems, stored.problems, gaps(folder)) == ((), (), [])
    expected = {
        "model.w": ("float32", (3, 4)),
        "model.b": ("bfloat16", (4,)),
        "model.e": ("float32", (0, 4)),
        "optim.state.w.exp_avg": ("float32", (3, 4)),
    }
    for one in (schema, stored):
        assert {t.name: (t.dtype, t.shape) for t in one.tensors} == expected
        assert one.containers == ("model", "optim")
    assert all(t.span is None for t in schema.tensors)
    assert {leaf.name: leaf.value for leaf in stored.leaves} == {"optim.param_groups.0.lr": 0.25, "step": 7}
    largest = {t.name: n and n.largest for t, n in zip(stored.tensors, found.files[1].numbers, strict=True)}
    assert largest == {"model.w": 11.0, "model.b": 1.0, "model.e": None, "optim.state.w.exp_avg": 0.5}


def test_one_flipped_bit_names_its_tensor(folder: Path) -> None:
    """The CRC-32 of each stored tensor is held against its bytes."""
    clean = structure(folder)
    for tensor in clean.tensors:
        if tensor.span is None:
            continue
        data = bytearray((folder / FILE).read_bytes())
        data[clean.spans[tensor.span].offset + 1] ^= 1
        other = Path(shutil.copytree(folder, folder.with_name(f"flipped-{tensor.name}")))
        (other / FILE).write_bytes(data)
        assert [p.tensor for p in structure(other).problems] == [tensor.name]


def test_nan_is_found_in_its_tensor(tmp_path: Path) -> None:
    """Count and first index, in the tensor that holds it."""
    saved = state()
    saved["model"]["w"][1, 2] = float("nan")  # type: ignore[index]
    save(saved, tmp_path / "step-1")
    file = scan(tmp_path / "step-1").files[1]
    bad = [
        (t.name, n.nan, n.first_bad) for t, n in zip(file.structure.tensors, file.numbers, strict=True) if n and n.nan
    ]
    assert bad == [("model.w", 1, 6)]


@pytest.mark.parametrize("name", [".metadata", FILE])
def test_every_truncation_is_seen(folder: Path, name: str) -> None:
    """Cut anywhere, a file is never whole."""
    data = (folder / name).read_bytes()
    for length in range(0, len(data), 61):
        (folder / name).write_bytes(data[:length])
        assert structure(folder, name).problems
        assert structure(folder, name).truncated


@pytest.mark.parametrize("name", [".metadata", FILE])
def test_trailing_bytes_are_a_problem(folder: Path, name: str) -> None:
    """Nothing may follow."""
    with (folder / name).open("ab") as file:
        file.write(b"x")
    assert structure(folder, name).problems


def test_without_metadata_a_file_is_unexplained(folder: Path) -> None:
    """It is written last, so its absence may mean that the save goes on."""
    (folder / ".metadata").unlink()
    assert structure(folder).truncated
    assert [(g.file, g.fatal) for g in gaps(folder)] == [("step-7/.metadata", True)]


def test_files_of_another_save_are_gaps(folder: Path) -> None:
    """Missing, short and foreign files are named; an empty one is what a rank without work leaves."""
    shutil.copy(folder / FILE, folder / "__1_0.distcp")
    (folder / "__2_0.distcp").touch()
    assert [g.file for g in gaps(folder)] == ["step-7/__1_0.distcp"]
    assert structure(folder, "__1_0.distcp").problems
    assert structure(folder, "__2_0.distcp").problems == ()
    (folder / "__1_0.distcp").unlink()
    (folder / FILE).write_bytes((folder / FILE).read_bytes()[:-10])
    assert [g.file for g in gaps(folder)] == [f"step-7/{FILE}"]
    (folder / FILE).unlink()
    assert [g.file for g in gaps(folder)] == [f"step-7/{FILE}"]


def test_old_metadata_beside_new_shapes(folder: Path, tmp_path: Path) -> None:
    """What .metadata says of a tensor's shape and type is held against what is stored."""
    other = tmp_path / "other"
    saved = state()
    saved["model"]["w"] = torch.arange(12.0).reshape(4, 3)  # type: ignore[index]
    save(saved, other)
    shutil.copy(other / FILE, folder / FILE)
    problems = structure(folder).problems
    assert [(p.tensor, p.expected, p.found) for p in problems] == [("model.w", "float32 [3, 4]", "float32 [4, 3]")]


def _entry(metadata: Metadata) -> _StorageInfo:
    return next(v for k, v in metadata.storage_data.items() if k.fqn == "model.w")


def _pieces(metadata: Metadata) -> list[ChunkStorageMetadata]:
    return metadata.state_dict_metadata["model.w"].chunks


def _no_place(metadata: Metadata) -> None:
    metadata.storage_data = {k: v for k, v in metadata.storage_data.items() if k.fqn != "model.w"}


EDITS: dict[str, Callable[[Metadata], None]] = {
    "outside": lambda m: setattr(_entry(m), "relative_path", "../x.distcp"),
    "absolute": lambda m: setattr(_entry(m), "relative_path", "/x.distcp"),
    "other file": lambda m: setattr(_entry(m), "relative_path", "model.safetensors"),
    "negative": lambda m: setattr(_entry(m), "offset", -1),
    "overlap": lambda m: setattr(_entry(m), "offset", 0),
    "no length": lambda m: setattr(_entry(m), "length", 0),
    "text": lambda m: setattr(_entry(m), "length", "9"),
    "no place": _no_place,
    "reaching out": lambda m: setattr(_pieces(m)[0], "sizes", torch.Size((3, 5))),
    "too small": lambda m: setattr(_pieces(m)[0], "sizes", torch.Size((2, 4))),
    "twice": lambda m: _pieces(m).append(_pieces(m)[0]),
    "no pieces": lambda m: _pieces(m).clear(),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_metadata_that_cannot_be(folder: Path, edit: Callable[[Metadata], None]) -> None:
    """Each is a problem that somebody's name stands beside, and nothing outside the folder is looked at."""
    change(folder, edit)
    found = structure(folder, ".metadata")
    assert any(p.tensor is not None for p in found.problems)
    assert set(found.chunks) <= {FILE}
    scan(folder)


def test_another_dtype_is_a_problem(folder: Path) -> None:
    """The stored tensor is not of the stated type."""
    change(folder, lambda m: setattr(m.state_dict_metadata["model.b"], "properties", TensorProperties(torch.float16)))
    assert [p.tensor for p in structure(folder).problems] == ["model.b"]


def test_flipped_bits_of_metadata_never_raise(folder: Path) -> None:
    """Any damage ends in structures whose spans are in order and inside the file."""
    data = (folder / ".metadata").read_bytes()
    for position in range(0, len(data), 23):
        (folder / ".metadata").write_bytes(data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :])
        end = 0
        for span in structure(folder).spans:
            assert end <= span.offset
            end = span.offset + span.length
        assert end <= (folder / FILE).stat().st_size


def test_pieces_cover_a_tensor() -> None:
    """Grids are whole; holes and overlaps are told."""
    grid = [((r, c), (2, 3)) for r in (0, 2) for c in (0, 3)]
    assert flaw_in_cover((4, 6), grid) is None
    assert flaw_in_cover((), [((), ())]) is None
    assert flaw_in_cover((0, 5), [((0, 0), (0, 3)), ((0, 3), (0, 2))]) is None
    assert "18 of 24" in str(flaw_in_cover((4, 6), grid[:3]))
    assert "overlap" in str(flaw_in_cover((4, 6), [*grid[:3], grid[0]]))
    assert "reaches beyond" in str(flaw_in_cover((4, 5), grid))


def test_pieces_are_named_by_their_place(folder: Path) -> None:
    """A tensor in two pieces: each under its own range."""

    def split(metadata: Metadata) -> None:
        metadata.state_dict_metadata["model.w"].size = torch.Size((6, 4))

    change(folder, split)
    assert "model.w[0:3, 0:4]" in [t.name for t in structure(folder).tensors]
    assert [p.tensor for p in structure(folder, ".metadata").problems] == ["model.w"]


def shard(folder: Path, rank: int, rows: slice) -> None:
    """One rank's file of the safetensors flavour, as HuggingFaceStorageWriter words it."""
    from safetensors.torch import save_file

    offsets = f'{{"w": {{"saved_offsets": [{rows.start}, 0]}}}}'
    name = folder / f"shard-0000{rank}-model-00001-of-00001.safetensors"
    save_file({"w": torch.ones(6, 2)[rows].clone()}, name, {"format": "pt", "DCP_SHARDING_INFO": offsets})


def test_safetensors_shards_are_held_together(tmp_path: Path) -> None:
    """A hole in a tensor tells that a rank's file is missing."""
    folder = tmp_path / "step-3"
    folder.mkdir()
    for rank, rows in enumerate((slice(0, 2), slice(2, 4), slice(4, 6)), 1):
        shard(folder, rank, rows)
    storage = open_storage(tmp_path)

    def found() -> list[Gap]:
        (checkpoint,) = find_checkpoints(storage.list("", recursive=True))
        return dcp_shard_gaps(
            checkpoint, {f.entry.key: f.structure for f in scan_files(storage, checkpoint.files).files}
        )

    assert found() == []
    (folder / "shard-00002-model-00001-of-00001.safetensors").unlink()
    (gap,) = found()
    assert gap.fatal
    assert "8 of 12" in gap.message
