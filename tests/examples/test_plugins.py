"""The plugins of `examples/plugins`, installed as users install them, and used by commands of their own processes."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from support.plugins import forget

from ckptguard.plugins.interface import Saved, SavedTensor
from ckptguard.testing import CheckContract, FormatContract

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "plugins"
MOST_LINES = 100


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Both, in a folder that this process and those that it starts see."""
    folder, copy = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("source")
    pip = [getattr(sys, "_base_executable", sys.executable), "-m", "pip", "--python", sys.executable]
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", "--target", str(folder)]
    for example in EXAMPLES.iterdir():
        (copy / example.name).mkdir()
        for file in example.iterdir():  # building writes nothing into the repository
            (copy / example.name / file.name).write_bytes(file.read_bytes())
    subprocess.run([*pip, "install", *options, *map(str, copy.iterdir())], check=True)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "path", [str(folder), *sys.path])
        patched.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH")))))
        forget()
        yield folder
    forget()


def command(*arguments: str, **settings: str) -> str:
    """What a command of its own process prints."""
    environ = {**os.environ, "CKPTGUARD_SETTLE": "0", **settings}
    words = [sys.executable, "-m", "ckptguard", *arguments]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    return done.stdout


def packed(value: Any) -> Any:
    """What `flax.serialization.msgpack_serialize` makes of an array and of a scalar."""
    array = np.asarray(value)
    code = 1 if isinstance(value, np.ndarray) else 3
    return msgpack.ExtType(code, msgpack.packb((array.shape, array.dtype.name, array.tobytes()), use_bin_type=True))


def flax_file(*, poison: bool = False) -> bytes:
    """A train state as flax writes it."""
    kernel = np.arange(2048, dtype="float32").reshape(64, 32)
    if poison:
        kernel[3, 3] = math.nan
    state = {
        "params": {"Dense_0": {"kernel": kernel, "bias": np.ones(32, dtype="float16")}},
        "opt_state": {"0": {"count": np.array(7, dtype="int32"), "mu": kernel * 0.5}},
        "lr": 0.125,
        "step": np.int64(7),
        "name": "a run",
    }
    return msgpack.packb(state, default=packed, strict_types=True)


class TestFlaxMsgpack(FormatContract):
    """The contract of formats."""

    name = "msgpack"

    def good(self) -> bytes:
        return flax_file()

    def tensors(self) -> list[str]:
        dense, state = "params.Dense_0", "opt_state.0"
        return [f"{dense}.kernel", f"{dense}.bias", f"{state}.count", f"{state}.mu", "lr", "step"]

    def test_our_scan_sees_the_numbers(self, tmp_path: Path) -> None:
        """NaN in an array is bad, and so is NaN in a plain number."""
        plain = msgpack.packb({"lr": math.nan, "w": np.ones(8)}, default=packed, strict_types=True)
        for data, outcome in ((flax_file(), "good"), (flax_file(poison=True), "bad"), (plain, "bad")):
            (tmp_path / "model.msgpack").write_bytes(data)
            assert command("verify", str(tmp_path / "model.msgpack")).startswith(outcome)

    @pytest.mark.parametrize(
        "data",
        [
            b"\x81" * 5000,  # maps in maps
            b"\xdf\xff\xff\xff\xff",  # four thousand million keys
            b"\xc9\x7f\xff\xff\xff\x01" + bytes(2000),  # an array of 2 GiB
            b"\x91" * 200_000,
            msgpack.packb({"w": msgpack.ExtType(1, msgpack.packb(((2**40, 2**40), "float32", b"1234")))}),
            msgpack.packb({"w": msgpack.ExtType(1, msgpack.packb(("x", "float" + "9" * 5000, b"1234")))}),
            msgpack.packb({"w": msgpack.ExtType(1, b"\xc1")}),
        ],
    )
    def test_hostile_files_are_no_trouble(self, data: bytes, tmp_path: Path) -> None:
        """Each is called wrong within the limits of the process."""
        found = self.read(tmp_path, data)
        assert found.problems or found.not_understood


class TestWeightRule(CheckContract):
    """The contract of checks."""

    name = "weight-rule"

    def good(self) -> Saved:
        tensor = SavedTensor("m.pt", "w", "float32", (4, 4), "model", 3.0, 1.0, 0.0, 0)
        return Saved("step-1", 1, (tensor,), (tensor,))

    def doubtful(self) -> Saved:
        before = SavedTensor("m.pt", "w", "float32", (4, 4), "model", 3.0, 1.0, 0.0)
        return Saved(
            "step-2", 2, (SavedTensor("m.pt", "w", "float32", (4, 4), "model", 90.0, 30.0, 0.0, 0),), (before,)
        )

    def test_a_run_that_names_it_is_judged_by_it(self, tmp_path: Path) -> None:
        """A weight beyond the limit makes a save suspect, by a command as by any other way."""
        for step, scale in ((1, 1.0), (2, 5000.0)):
            weight = torch.linspace(-1.0, 1.0, 64).reshape(8, 8) * scale
            torch.save({"model": {"w": weight}, "step": step}, tmp_path / f"model_{step}.pt")
        said = command("verify", str(tmp_path), CKPTGUARD_CHECKS="weight-rule")
        assert "suspect    model_2.pt" in said
        assert "[plugin:weight-rule]" in said
        assert "good       model_1.pt" in said


@pytest.mark.parametrize("example", sorted(p.name for p in EXAMPLES.iterdir()))
def test_an_example_is_short(example: str) -> None:
    """Each has fewer than a hundred lines."""
    (module,) = EXAMPLES.joinpath(example).glob("*.py")
    assert len(module.read_text().splitlines()) < MOST_LINES
