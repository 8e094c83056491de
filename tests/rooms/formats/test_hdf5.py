"""HDF5 and Keras: datasets as tensors, and never a byte of another file."""

from __future__ import annotations

import math
import sys
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest
from support.container_files import hdf5_bytes, hdf5_of, keras_arrays, keras_zip, zip_of
from support.format_files import scan_of, structure_of
from support.judged_files import outcome_in_run
from support.runs import QUICK
from support.views import look

from ckptguard.formats import hdf5, table
from ckptguard.layouts.roles import assign_roles
from ckptguard.runs.work import Work
from ckptguard.scan import scanner_of
from ckptguard.values.verdict import Outcome
from ckptguard.verification.target import verify_target

KERNEL = np.arange(1, 241, dtype=np.float32).reshape(12, 20)
WAYS: dict[str, dict[str, object]] = {
    "stored": {},
    "chunks": {"chunks": True},
    "deflated": {"compression": "gzip"},
    "LZF": {"compression": "lzf", "shuffle": True},
    "checksums": {"fletcher32": True},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f2", "<f8", "<c8"])
def test_nan_in_a_dataset_is_bad(tmp_path: Path, way: str, dtype: str) -> None:
    """However it is stored. Without it the file is good."""
    for poison in (False, True):
        kernel = KERNEL.astype(dtype)
        kernel[7, 5] = math.nan if poison else 1
        data = hdf5_bytes(keras_arrays(kernel), **WAYS[way])
        folder = tmp_path / str(poison)
        assert outcome_in_run(folder, "ckpt-05.weights.h5", data) is (Outcome.BAD if poison else Outcome.GOOD)


def test_a_file_of_keras_is_good_and_nan_in_it_is_bad(tmp_path: Path) -> None:
    """The archive with its settings and weights."""
    assert outcome_in_run(tmp_path / "a", "model.05.keras", keras_zip(KERNEL)) is Outcome.GOOD
    assert outcome_in_run(tmp_path / "b", "model.05.keras", keras_zip(KERNEL * math.nan)) is Outcome.BAD
    cut = keras_zip(KERNEL)[:-2000]
    assert outcome_in_run(tmp_path / "c", "model.05.keras", cut) in (Outcome.BAD, Outcome.PENDING, Outcome.INCOMPLETE)
    broken = zip_of([("metadata.json", b"{}"), ("config.json", b"{}"), ("model.weights.h5", hdf5_bytes({})[:-9])])
    assert outcome_in_run(tmp_path / "d", "model.05.keras", broken) is Outcome.BAD


def test_roles_are_those_of_the_groups(tmp_path: Path) -> None:
    """Weights, and the optimizer's state."""
    found = structure_of(tmp_path, "a.weights.h5", hdf5_bytes(keras_arrays(KERNEL)))
    roles = assign_roles("a.weights.h5", found.tensors, containers=found.containers)
    by_name = dict(zip((t.name for t in found.tensors), roles, strict=True))
    assert by_name["layers.dense.vars.0"] == "model"
    assert by_name["optimizer.vars.2"] == "optimizer"


def bfloat16(bits: int) -> bytes:
    """A variable of Keras in bfloat16, which it stores as bytes without a type."""

    def fill(file: h5py.File) -> None:
        array = np.full(8, bits, np.uint16).view("V2")
        file.create_dataset("layers/dense/vars/0", data=array).attrs["dtype"] = "bfloat16"

    return hdf5_of(fill)


def test_bfloat16_of_keras(tmp_path: Path) -> None:
    """It is read by its bits."""
    [numbers] = scan_of(tmp_path, "a.weights.h5", bfloat16(0x3F80)).files[0].numbers
    assert numbers is not None
    assert (numbers.count, numbers.largest, numbers.nan) == (8, 1.0, 0)
    [numbers] = scan_of(tmp_path, "a.weights.h5", bfloat16(0x7FC0)).files[0].numbers
    assert numbers is not None
    assert numbers.nan == 8


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["V2", "<u2", ">u2"])
@pytest.mark.parametrize("bits", [0x3F80, 0x7FC0, 0xFF80])
def test_bfloat16_is_looked_at_however_it_is_stored(tmp_path: Path, way: str, dtype: str, bits: int) -> None:
    """One number of very many that is not finite is bad; finite ones are good."""
    array = np.full(4096, 0x3F80, "<u2" if dtype == "V2" else dtype)
    array[3001] = bits

    def fill(file: h5py.File) -> None:
        stored = file.create_dataset("layers/dense/vars/0", data=array.view(dtype), **WAYS[way])
        stored.attrs["dtype"] = "bfloat16"

    wanted = Outcome.GOOD if bits == 0x3F80 else Outcome.BAD
    assert outcome_in_run(tmp_path, "ckpt-05.weights.h5", hdf5_of(fill)) is wanted


@pytest.mark.parametrize("filters", [{"compression": "gzip"}, {"compression": "gzip", "fletcher32": True}])
def test_a_chunk_that_unpacks_to_more_than_it_should_is_not_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filters: dict[str, object]
) -> None:
    """The library would take memory for all of it. It is not good."""

    def fill(file: h5py.File) -> None:
        stored = file.create_dataset("w", shape=(1000,), dtype="f4", chunks=(1000,), **filters)
        stored.id.write_direct_chunk((0,), zlib.compress(bytes(50 << 20)))

    monkeypatch.setattr(h5py.Dataset, "__getitem__", lambda *_: pytest.fail("it was unpacked"))
    found = structure_of(tmp_path, "a.weights.h5", hdf5_of(fill))
    assert found.not_understood == ("'w', which is packed,",)


def test_a_dataset_of_very_many_chunks_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library would take memory for each, though the file holds none of them."""

    def fill(file: h5py.File) -> None:
        file.create_dataset("w", shape=(1, 1 << 20), dtype="f4", chunks=(1, 4), compression="gzip", fillvalue=1)

    monkeypatch.setattr(h5py.Dataset, "__getitem__", lambda *_: pytest.fail("it was unpacked"))
    assert structure_of(tmp_path, "a.weights.h5", hdf5_of(fill)).not_understood == ("'w', which is packed,",)


def made(fill) -> bytes:  # type: ignore[no-untyped-def]
    """An HDF5 file with weights and what `fill` adds."""

    def both(file: h5py.File) -> None:
        file["layers/dense/vars/0"] = KERNEL
        fill(file)

    return hdf5_of(both)


def external(file: h5py.File, name: str) -> None:
    """A dataset whose bytes are in another file."""
    file.create_dataset("layers/evil", (100,), np.float32, external=[(name, 0, 400)])


def virtual(file: h5py.File, name: str) -> None:
    """A dataset that is a view of another file."""
    layout = h5py.VirtualLayout((10,), np.float32)
    layout[:] = h5py.VirtualSource(name, "x", (10,))
    file.create_virtual_dataset("layers/evil", layout)


def linked(file: h5py.File, name: str) -> None:
    """A link to another file."""
    file["layers/evil"] = h5py.ExternalLink(name, "/layers")


@pytest.mark.parametrize("how", [external, virtual, linked])
def test_other_files_are_never_opened(tmp_path: Path, how) -> None:  # type: ignore[no-untyped-def]
    """It is bad, and the other file is not touched: what would be read in it is sick, and not told."""
    other = tmp_path / "other.h5"
    other.write_bytes(hdf5_bytes({"x": np.full(10, math.nan, np.float32), "layers/a": KERNEL * math.nan}))
    opened: list[str] = []
    active = [True]
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if active[0] and event == "open" else None)
    found = structure_of(tmp_path, "a.weights.h5", made(lambda file: how(file, str(other))))
    active[0] = False
    assert len(found.problems) == 1
    assert "which " in found.problems[0].message
    assert str(other) not in opened
    assert outcome_in_run(tmp_path / "run", "a.weights.h5", made(lambda file: how(file, str(other)))) is Outcome.BAD


def test_links_inside_and_cycles_end(tmp_path: Path) -> None:
    """A group in itself, a second name of a dataset, a link that leads nowhere."""

    def fill(file: h5py.File) -> None:
        file["layers/again"] = file["layers"]
        file["layers/dense/second"] = file["layers/dense/vars/0"]
        file["layers/nowhere"] = h5py.SoftLink("/nothing")

    found = structure_of(tmp_path, "a.weights.h5", made(fill))
    assert (found.problems, len(found.tensors)) == ((), 1)


@pytest.mark.parametrize(
    "dtype", [h5py.vlen_dtype(np.float32), np.dtype([("a", "f4"), ("b", "i4")]), np.dtype(("f4", 3))]
)
def test_types_that_are_not_read_keep_it_from_being_good(tmp_path: Path, dtype: np.dtype) -> None:
    """They may hold weights."""
    data = made(lambda file: file.create_dataset("layers/other", (3,), dtype))
    assert outcome_in_run(tmp_path / "run", "ckpt-05.weights.h5", data) is Outcome.SUSPECT


def test_texts_are_no_weights(tmp_path: Path) -> None:
    """Names and settings in a file, in any form."""

    def fill(file: h5py.File) -> None:
        file["names"] = np.array([b"a", b"bc"])
        file["text"] = "hello"
        file["flags"] = np.array([True, False])

    assert outcome_in_run(tmp_path / "run", "a.weights.h5", made(fill)) is Outcome.GOOD


def test_without_h5py_it_is_not_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is reported, and under a pattern it is not good. What was sealed with h5py stays as it was sealed."""
    path = tmp_path / "run" / "ckpt-05.weights.h5"
    assert outcome_in_run(tmp_path / "run", path.name, hdf5_bytes(keras_arrays(KERNEL))) is Outcome.GOOD
    monkeypatch.setattr(hdf5, "HAS_H5PY", False)
    monkeypatch.setattr(table, "HDF5", ())
    rows = [row if row.name != "hdf5" else type(row)(row.name, row.matches, row.module) for row in table.FORMATS]
    monkeypatch.setattr(table, "FORMATS", tuple(rows))
    [again] = verify_target(str(tmp_path / "run"), QUICK).checkpoints
    assert again.outcome is Outcome.SUSPECT
    assert [f.check for f in again.findings if f.severity in ("error", "sickness")] == ["understood"]
    path.rename(tmp_path / path.name)
    unread = look(str(tmp_path)).listing.not_understood
    assert unread is not None
    assert path.name in unread.paths


@pytest.mark.parametrize("name", ["ckpt-05.weights.h5", "model.05.keras", "weights.bin"])
def test_a_local_file_is_parsed_in_a_scanning_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A library in C that dies takes no command with it, whatever the file is called."""

    def refuse(*_: object) -> None:
        raise AssertionError("h5py was used in this process")

    monkeypatch.setattr(hdf5, "read", refuse)
    data = keras_zip(KERNEL) if name.endswith(".keras") else hdf5_bytes(keras_arrays(KERNEL))
    (tmp_path / name).write_bytes(data)
    assert verify_target(str(tmp_path / name), QUICK, work=Work(scanner=scanner_of(QUICK))).outcome is Outcome.GOOD
