"""A format's suffixes stand in its own row, and everything that judges by a name asks the table."""

from __future__ import annotations

import pytest

from ckptguard.formats import Format, format_of, table, tensor_suffix
from ckptguard.formats.table import has_tensor_suffix, is_pickle_name, suffixes_of
from ckptguard.layouts.discovery import find_checkpoints
from ckptguard.layouts.hub_snapshot import _are_other_weights
from ckptguard.layouts.plain_folder import holds_weights
from ckptguard.layouts.step_names import step_from_name
from ckptguard.storage import Entry
from ckptguard.values.manifest import WHOLE_FORMATS


def added(monkeypatch: pytest.MonkeyPatch, holds: str) -> None:
    """Put a row of a new format first."""

    def matches(path: str, head: bytes) -> bool:
        return path.endswith(".new")

    row = Format(
        name="new",
        matches=matches,
        module="opaque",
        suffixes=(".new", ".new.gz"),
        holds=holds,  # type: ignore[arg-type]
    )
    monkeypatch.setattr(table, "FORMATS", (row, *table.FORMATS))


def test_a_new_row_is_seen_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row makes its files known: as tensors, by their step, as checkpoints; without it they are nothing."""
    name, entry = "net-500.new.gz", Entry(key="net-500.new", kind="file", size=1)
    assert not tensor_suffix(name)
    assert (step_from_name(name), find_checkpoints([entry])) == (None, [])
    added(monkeypatch, "tensors")
    assert (format_of("x.new", b"").name, has_tensor_suffix(name), tensor_suffix(name)) == ("new", True, True)
    assert (step_from_name(name), holds_weights(name)) == (500, True)
    assert [(c.path, c.step) for c in find_checkpoints([entry])] == [("net-500.new", 500)]
    assert not is_pickle_name(name)


@pytest.mark.parametrize("holds", ["arrays", "objects", "pieces"])
def test_what_it_holds_decides_what_its_name_means(holds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays are a checkpoint's by their words only, objects are pickles, pieces are nothing by themselves."""
    assert not _are_other_weights("x.new")
    added(monkeypatch, holds)
    assert _are_other_weights("x.new")
    assert is_pickle_name("x.new") is (holds == "objects")
    assert has_tensor_suffix("x.new") is (holds == "pieces")
    assert (step_from_name("net-500.new") == 500) is (holds == "arrays")
    assert (tensor_suffix("data.new"), tensor_suffix("model.new")) == (holds == "pieces", holds in ("pieces", "arrays"))


def test_one_digest_is_of_all_bytes_where_an_older_version_sees_only_bytes() -> None:
    """Else that version calls bad what this one has sealed: each format since the first release is in the list."""
    first = {"npz", "npy", "distcp", "dcp_metadata", "safetensors", "torch_zip", "torch_legacy", "pickle"}
    assert {row.name for row in table.FORMATS if row.suffixes or row.unsummed} - first <= WHOLE_FORMATS


def test_the_table_says_what_it_always_said() -> None:
    """The suffixes that users know."""
    of_torch = {".pt", ".pth", ".bin", ".ckpt", ".pth.tar", ".pt.tar"}
    assert set(suffixes_of("tensors")) == {*of_torch, ".safetensors", ".gguf", ".nemo", ".keras"}
    assert set(suffixes_of("arrays")) == {".npy", ".npz", ".weights.h5", ".h5", ".hdf5"}
    assert set(suffixes_of("objects")) == {".pkl", ".pickle"}
    assert suffixes_of("pieces") == (".distcp",)
    assert [step_from_name(f"net-5{s}") for s in (".pt", ".pth.tar", ".npz", ".pkl", ".distcp")] == [
        5,
        5,
        5,
        None,
        None,
    ]
