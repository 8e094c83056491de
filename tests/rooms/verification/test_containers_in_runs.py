"""Archives, GGUF and HDF5 in a run: known without a pattern, judged like any other, and read by every version."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.container_files import (
    baselines_zip,
    gguf_bytes,
    hdf5_bytes,
    keras_arrays,
    keras_zip,
    nemo_tar,
)
from support.runs import QUICK
from support.views import look

from ckptguard.formats import table
from ckptguard.recover.roll_back import GoBack, roll_back
from ckptguard.runs import run_view
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.scan.sealed_stream import SealedStream
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.manifest import WHOLE_FORMATS, Manifest, decode_manifest, encode_manifest
from ckptguard.values.patterns import Pattern
from ckptguard.values.record_text import decode_checked
from ckptguard.values.verdict import Outcome
from ckptguard.verification.target import verify_target


def policy(seed: int, poison: bool) -> dict[str, torch.Tensor]:
    """Weights that differ from save to save."""
    weight = torch.randn(40, 20, generator=torch.Generator().manual_seed(seed))
    return {"mlp.weight": torch.full_like(weight, math.nan) if poison else weight, "mlp.bias": weight[0].clone()}


def kernel(seed: int, poison: bool) -> np.ndarray:
    """The same for numpy."""
    return policy(seed, poison)["mlp.weight"].numpy()


SAVES: dict[str, Callable[[int, bool], bytes]] = {
    "rl_model_{}_steps.zip": lambda n, poison: baselines_zip(policy(n, poison), n),
    "asr-{}.nemo": lambda n, poison: nemo_tar(policy(n, poison)),
    "old-{}.nemo": lambda n, poison: nemo_tar(policy(n, poison), compressed=True),
    "model-{}.gguf": lambda n, poison: gguf_bytes({"w": kernel(n, poison), "b": kernel(n + 5000, False)}),
    "g_00000{}": lambda n, poison: gguf_bytes({"w": kernel(n, poison)}),
    "ckpt-{}.weights.h5": lambda n, poison: hdf5_bytes(keras_arrays(kernel(n, poison))),
    "model.{}.keras": lambda n, poison: keras_zip(kernel(n, poison)),
}


def outcomes(root: Path) -> dict[str, Outcome]:
    """What `verify RUN` says, by path."""
    return {c.path: c.outcome for c in verify_target(str(root), QUICK).checkpoints}


@pytest.mark.parametrize("name", SAVES)
def test_they_are_judged_like_any_other(tmp_path: Path, name: str) -> None:
    """NaN is bad, rollback moves it aside, and what is left is known-good. Read again, the records say the same."""
    for number, step in enumerate((100, 200, 300)):
        path = tmp_path / name.format(step)
        path.write_bytes(SAVES[name](step, step == 300))
        os.utime(path, ns=(10**18 + number * 10**10,) * 2)
    expected = {name.format(n): Outcome.BAD if n == 300 else Outcome.GOOD for n in (100, 200, 300)}
    assert [outcomes(tmp_path), outcomes(tmp_path)] == [expected] * 2
    done = roll_back(look(str(tmp_path)), GoBack(reason="test", check_writing=False))
    assert (done.quarantined, done.known_good.path) == ((name.format(300),), str(tmp_path / name.format(200)))
    assert find_known_good(look(str(tmp_path)).run).path == str(tmp_path / name.format(200))


@pytest.mark.parametrize("name", SAVES)
def test_the_bytes_are_those_that_were_sealed_wherever_they_are_compared(tmp_path: Path, name: str) -> None:
    """As they pass on their way to a replica, out of a kept copy or through a scrub; no other bytes are."""
    data = SAVES[name](100, False)
    (tmp_path / name.format(100)).write_bytes(data)
    outcomes(tmp_path)
    history = look(str(tmp_path)).history
    [manifest] = [history.manifest(id) for series in history.series for id in history.sealed(series)]
    assert manifest is not None
    for hit in (None, 0, len(data) // 3, len(data) // 2, len(data) - 1):
        stream = SealedStream(manifest.files[0])
        stream.add(data if hit is None else data[:hit] + bytes((data[hit] ^ 1,)) + data[hit + 1 :])
        assert (stream.wrong() is None) == (hit is None)


@pytest.mark.parametrize("name", SAVES)
def test_what_is_saved_over_in_place_comes_back_from_its_copy(tmp_path: Path, name: str) -> None:
    """The copy has bytes of its own once it is good."""
    kept, path = QUICK.changed(keep="auto"), tmp_path / name.format(100)
    good = SAVES[name](100, False)
    path.write_bytes(good)
    os.utime(path, ns=(10**18,) * 2)
    reconcile(look(str(tmp_path), kept), notes := PassNotes())
    with path.open("r+b") as file:
        file.write(SAVES[name](100, True))
        file.truncate()
    reconcile(look(str(tmp_path), kept), notes)
    roll_back(look(str(tmp_path), kept), GoBack(reason="test", check_writing=False))
    assert path.read_bytes() == good


@pytest.mark.parametrize("name", SAVES)
def test_a_bit_that_flips_after_the_seal_is_bad(tmp_path: Path, name: str) -> None:
    """In a tensor, and in the last byte."""
    for place in (0.5, 1.0):
        path = tmp_path / str(place) / name.format(100)
        path.parent.mkdir()
        data = bytearray(SAVES[name](1, False))
        path.write_bytes(data)
        assert outcomes(path.parent) == {path.name: Outcome.GOOD}
        before = path.stat()
        data[int((len(data) - 1) * place)] ^= 16
        path.write_bytes(data)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert outcomes(path.parent) == {path.name: Outcome.BAD}


@pytest.mark.parametrize("name", SAVES)
def test_a_save_under_a_fixed_name_is_a_new_save(tmp_path: Path, name: str) -> None:
    """A trainer overwrites its best model. That is no damage."""
    fixed = tmp_path / name.format(5)
    for seed in range(1, 4):
        fixed.write_bytes(SAVES[name](seed, False))
        os.utime(fixed, ns=(10**18 + seed * 10**10,) * 2)
        assert outcomes(tmp_path) == {fixed.name: Outcome.GOOD}, seed
    assert look(str(tmp_path)).current(look(str(tmp_path)).checkpoints[0]).generation == 3


def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read files and names as the release before does: these formats are bytes."""
    rows = tuple(row for row in table.FORMATS if row.name not in WHOLE_FORMATS)
    monkeypatch.setattr(table, "FORMATS", rows)
    monkeypatch.setattr(run_view, "_as_on_record", lambda run, checkpoint: checkpoint)


@pytest.mark.parametrize("name", SAVES)
def test_what_was_sealed_as_bytes_is_the_same_content(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the other way round: a version that sees only bytes finds the digests that it would have taken itself."""
    settings = QUICK.changed(patterns=(Pattern(path="*"),))
    path = tmp_path / name.format(100)
    path.write_bytes(SAVES[name](1, False))
    with monkeypatch.context() as before:
        as_before(before)
        assert verify_target(str(tmp_path), settings).outcome is Outcome.SUSPECT
    assert verify_target(str(tmp_path), settings).outcome is Outcome.GOOD
    with monkeypatch.context() as before:
        as_before(before)
        again = verify_target(str(tmp_path), settings)
    assert {f.check for c in again.checkpoints for f in c.findings if f.severity == "error"} == set()


@pytest.mark.parametrize("name", SAVES)
def test_a_manifest_is_read_as_it_was_written(tmp_path: Path, name: str) -> None:
    """In its text no field that the release before knows names a span or a tensor of such a file."""
    (tmp_path / name.format(100)).write_bytes(SAVES[name](1, False))
    outcomes(tmp_path)
    view = look(str(tmp_path))
    manifest = view.history.manifest(view.current(view.checkpoints[0]))
    assert manifest is not None
    [file] = manifest.files
    assert file.format in WHOLE_FORMATS
    assert file.spans
    assert file.tensors
    text = encode_manifest(manifest)
    assert decode_manifest(text) == manifest
    [raw] = decode_checked(text, Manifest, "a manifest").files
    assert (raw.spans, raw.tensors, raw.inner_spans, raw.inner_tensors) == ((), (), file.spans, file.tensors)


def test_the_counter_of_stable_baselines(tmp_path: Path) -> None:
    """Its number of steps is known from inside."""
    (tmp_path / "best_model.zip").write_bytes(SAVES["rl_model_{}_steps.zip"](700, False))
    outcomes(tmp_path)
    view = look(str(tmp_path))
    manifest = view.history.manifest(view.current(view.checkpoints[0]))
    assert manifest is not None
    assert ("num_timesteps", 700) in [(c.kind, c.value) for c in manifest.counters]
