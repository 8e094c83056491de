"""What every format's reader must keep. A new format inherits `FormatContract` and says how its files are made."""

from __future__ import annotations

import io
import random
import zipfile
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from blake3 import blake3
from support.container_files import baselines_files, gguf_bytes, hdf5_bytes, keras_zip, nemo_tar, zip_of
from support.format_files import FLOATS, pickled, safetensors_bytes, scan_of, some_tensors, structure_of, torch_bytes

from ckptguard.formats import format_of
from ckptguard.formats.suffixes import FIRST_BYTES
from ckptguard.scan import ScanOptions


class FormatContract:
    """Laws for any format."""

    format: ClassVar[str]
    name: ClassVar[str]

    def make(self) -> bytes:
        """A small valid file, as the real writer makes it."""
        raise NotImplementedError

    def test_the_table_finds_the_format(self) -> None:
        """Name and first bytes lead to this format's row."""
        assert format_of(self.name, self.make()[:FIRST_BYTES]).name == self.format

    def test_a_valid_file_has_no_problems(self, tmp_path: Path) -> None:
        """What the real writer makes raises no alarm."""
        structure = structure_of(tmp_path, self.name, self.make())
        assert (structure.format, structure.problems, structure.truncated) == (self.format, (), False)

    def test_every_truncation_is_a_problem(self, tmp_path: Path) -> None:
        """A file cut anywhere is never whole."""
        data = self.make()
        for length in range(len(data)):
            assert structure_of(tmp_path, self.name, data[:length]).problems, f"cut to {length} bytes"

    def test_a_trailing_byte_is_a_problem(self, tmp_path: Path) -> None:
        """Nothing may stand behind the file's own structure."""
        structure = structure_of(tmp_path, self.name, self.make() + b"x")
        assert structure.problems
        assert not structure.truncated

    def test_flipped_bits_never_raise(self, tmp_path: Path) -> None:
        """Any damage ends in a Structure, and spans stay inside the file, in order and apart."""
        data = self.make()
        seeds = random.Random(20)
        for _ in range(300):
            damaged = bytearray(data)
            for _ in range(seeds.choice((1, 1, 1, 5))):
                position = seeds.randrange(len(damaged))
                damaged[position] ^= 1 << seeds.randrange(8)
            structure = structure_of(tmp_path, self.name, bytes(damaged))
            end = 0
            for span in structure.spans:
                assert end <= span.offset
                end = span.offset + span.length
            assert end <= len(damaged)

    def test_digests_do_not_depend_on_how_the_file_is_read(self, tmp_path: Path) -> None:
        """One thread or several, with or without other sums: the same digests."""
        data = self.make()
        first = scan_of(tmp_path, self.name, data).files[0]
        second = scan_of(tmp_path, self.name, data, ScanOptions(workers=1, sums=("sha256",), md5=False)).files[0]
        assert first.md5 is not None
        assert (first.envelope, first.span_digests) == (second.envelope, second.span_digests)


class TensorFormatContract(FormatContract):
    """Laws for formats that hold tensors."""

    def write(self, tensors: dict[str, torch.Tensor]) -> bytes:
        """What the real writer makes of these tensors."""
        raise NotImplementedError

    def make(self) -> bytes:
        return self.write(some_tensors())

    def test_the_tensor_table_is_the_writers(self, tmp_path: Path) -> None:
        """Names, types, shapes and bytes are those that were saved."""
        tensors = some_tensors()
        data = self.write(tensors)
        structure = structure_of(tmp_path, self.name, data)
        found = {t.name: t for t in structure.tensors}
        assert set(found) == set(tensors)
        for name, tensor in tensors.items():
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
    def test_nan_is_found_where_it_is(self, tmp_path: Path, dtype: torch.dtype) -> None:
        """Count and first index of NaN and infinities are exact in every float type."""
        tensor = torch.ones(101).to(dtype)
        tensor[17] = float("nan")
        tensor[40] = float("nan")
        infinities = dtype != torch.float8_e4m3fn
        if infinities:
            tensor[9] = float("inf")
            tensor[90] = float("-inf")
        file = scan_of(tmp_path, self.name, self.write({"before": torch.ones(3), "w": tensor})).files[0]
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

    def test_damage_in_a_tensor_changes_its_span_digest_alone(self, tmp_path: Path) -> None:
        """A flipped bit in stored elements is seen in that span's digest, and nowhere else."""
        data = self.write(some_tensors())
        good = scan_of(tmp_path, self.name, data).files[0]
        place = next(t for t in good.structure.tensors if t.name == "float32")
        assert place.span is not None
        damaged = bytearray(data)
        damaged[good.structure.spans[place.span].offset + 1] ^= 4
        bad = scan_of(tmp_path, self.name, bytes(damaged)).files[0]
        assert bad.envelope == good.envelope
        differing = [
            i for i, pair in enumerate(zip(good.span_digests, bad.span_digests, strict=True)) if len(set(pair)) > 1
        ]
        assert differing == [place.span]


class TestSafetensors(TensorFormatContract):
    format = "safetensors"
    name = "model.safetensors"

    def write(self, tensors: dict[str, torch.Tensor]) -> bytes:
        return safetensors_bytes(tensors)


class TestTorchZip(TensorFormatContract):
    format = "torch_zip"
    name = "model.pt"

    def write(self, tensors: dict[str, torch.Tensor]) -> bytes:
        return torch_bytes(tensors)

    def test_a_wrong_crc_is_a_problem_of_its_tensor(self, tmp_path: Path) -> None:
        """torch never looks at the CRC that it writes; we do, and name the tensor."""
        data = bytearray(self.make())
        structure = structure_of(tmp_path, self.name, bytes(data))
        place = next(t for t in structure.tensors if t.name == "ids")
        assert place.span is not None
        data[structure.spans[place.span].offset] ^= 1
        file = scan_of(tmp_path, self.name, bytes(data)).files[0]
        assert [p.tensor for p in file.structure.problems] == ["ids"]


class TestTorchLegacy(TensorFormatContract):
    format = "torch_legacy"
    name = "old.pth"

    def write(self, tensors: dict[str, torch.Tensor]) -> bytes:
        return torch_bytes(tensors, _use_new_zipfile_serialization=False)


class TestNpy(FormatContract):
    format = "npy"
    name = "weights.npy"

    def make(self) -> bytes:
        buffer = io.BytesIO()
        np.save(buffer, np.arange(20, dtype=">f4").reshape(4, 5))
        return buffer.getvalue()


class TestNpz(FormatContract):
    format = "npz"
    name = "step_100.npz"

    def make(self) -> bytes:
        buffer = io.BytesIO()
        np.savez(buffer, w=np.arange(20.0).reshape(4, 5), step=np.int64(100), none=np.zeros((0, 2)))
        return buffer.getvalue()


class TestDeflatedNpz(FormatContract):
    format = "npz"
    name = "step_100.npz"

    def make(self) -> bytes:
        buffer = io.BytesIO()
        np.savez_compressed(buffer, w=np.arange(20.0).reshape(4, 5), step=np.int64(100))
        return buffer.getvalue()


class TestPickle(FormatContract):
    format = "pickle"
    name = "random_states_0.pkl"

    def make(self) -> bytes:
        return pickled({"lr": 0.1, "seen": [1, 2, 3], "name": "run"}, 4)


class TestIndex(FormatContract):
    format = "hf_index"
    name = "model.safetensors.index.json"

    def make(self) -> bytes:
        return b'{"metadata": {"total_size": 8}, "weight_map": {"w": "model-00001-of-00002.safetensors"}}'


class TestTrainerState(FormatContract):
    format = "trainer_state"
    name = "trainer_state.json"

    def make(self) -> bytes:
        return b'{"global_step": 8, "log_history": [{"loss": 0.0, "grad_norm": NaN, "step": 8}]}'


class TestOwnState(FormatContract):
    format = "ckptguard_state"
    name = "step-000000500/state.json"

    def make(self) -> bytes:
        return b'{"ckptguard_state": 1, "optimizer": {"lr": 0.1, "scale": {"$float": "inf"}}, "other": {"x": 1}}'

    def test_digests_do_not_depend_on_how_the_file_is_read(self, tmp_path: Path) -> None:
        """One thread or several, with or without other sums: the same digests."""
        (tmp_path / "step-000000500").mkdir()
        super().test_digests_do_not_depend_on_how_the_file_is_read(tmp_path)


class ContainerContract(FormatContract):
    """Laws for files that an older version of ours takes for mere bytes."""

    def test_the_digest_is_that_of_all_bytes(self, tmp_path: Path) -> None:
        """So every version says the same of the same bytes."""
        data = self.make()
        assert scan_of(tmp_path, self.name, data).files[0].envelope == blake3(data).hexdigest()


class TestZipOfFiles(ContainerContract):
    format = "zip"
    name = "rl_model_500_steps.zip"
    how: ClassVar[int] = zipfile.ZIP_STORED

    def make(self) -> bytes:
        return zip_of(baselines_files({"mlp.weight": torch.ones(3, 2)}), self.how)

    def test_every_truncation_is_a_problem(self, tmp_path: Path) -> None:
        """A file cut anywhere is never whole. Of its first bytes nothing says what it is."""
        data = self.make()
        for length in [*range(400), *range(400, len(data), 17), len(data) - 1]:
            structure = structure_of(tmp_path, self.name, data[:length])
            assert structure.truncated if length > 80 else structure.problems or structure.format == "opaque", length


class TestDeflatedZipOfFiles(TestZipOfFiles):
    how = zipfile.ZIP_DEFLATED

    def make(self) -> bytes:
        return zip_of(baselines_files({"mlp.weight": torch.ones(3, 2)})[2:], self.how)


class TestTarOfFiles(ContainerContract):
    format = "tar"
    name = "asr.nemo"

    def make(self) -> bytes:
        return nemo_tar({"encoder.weight": torch.ones(3, 2)})


class TestCompressedTarOfFiles(TestTarOfFiles):
    def make(self) -> bytes:
        return nemo_tar({"encoder.weight": torch.ones(3, 2)}, compressed=True)


class TestGguf(ContainerContract):
    format = "gguf"
    name = "model-f16.gguf"

    def make(self) -> bytes:
        return gguf_bytes({"a": np.ones((4, 8), np.float32), "b": np.ones(16, np.float16)})


class TestHdf5(ContainerContract):
    format = "hdf5"
    name = "ckpt-05.weights.h5"

    def make(self) -> bytes:
        return hdf5_bytes({"layers/dense/vars/0": np.ones((2, 3), np.float32), "optimizer/vars/0": np.asarray(3)})


class TestKeras(ContainerContract):
    format = "zip"
    name = "model.05.keras"

    def make(self) -> bytes:
        return keras_zip(np.ones((2, 3), np.float32))
