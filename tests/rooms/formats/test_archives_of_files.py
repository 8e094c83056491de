"""Zip and tar archives of files are read as folders: every byte, every number, and nothing that leads out of them."""

from __future__ import annotations

import gzip
import io
import math
import pickle
import random
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.container_files import (
    baselines_data,
    baselines_files,
    baselines_zip,
    keras_zip,
    nemo_files,
    nemo_tar,
    tar_of,
    zip_of,
)
from support.format_files import npz_bytes, safetensors_bytes, scan_of, structure_of, torch_bytes
from support.judged_files import outcome_in_run
from support.views import look

from ckptguard.layouts.roles import assign_roles
from ckptguard.scan.result import ScannedFile
from ckptguard.values.verdict import Outcome

POLICY = {"mlp.weight": torch.arange(1200.0).reshape(60, 20) + 1, "mlp.bias": torch.ones(3)}
ROUTES: dict[str, Callable[[dict[str, torch.Tensor]], bytes]] = {
    "agent_500_steps.zip": baselines_zip,
    "deflated_500.zip": lambda state: zip_of(baselines_files(state), zipfile.ZIP_DEFLATED),
    "safetensors_500.zip": lambda state: zip_of([("model.safetensors", safetensors_bytes(state))]),
    "arrays_500.zip": lambda state: zip_of(
        [("model.pth", torch_bytes({})), ("w_model.npz", npz_bytes({name: t.numpy() for name, t in state.items()}))]
    ),
    "asr.nemo": nemo_tar,
    "old.nemo": lambda state: nemo_tar(state, compressed=True),
    "shards-500.tar": lambda state: tar_of(
        [(f"model-{n}.pth", torch_bytes({name: state[name]})) for n, name in enumerate(state)], of_folder=False
    ),
}


def scanned(folder: Path, name: str, data: bytes) -> ScannedFile:
    """One scanned file."""
    return scan_of(folder, name, data).files[0]


@pytest.mark.parametrize("name", ROUTES)
def test_tensors_are_named_by_their_file_and_good(tmp_path: Path, name: str) -> None:
    """All tensors are there, with their shapes, and the save is a checkpoint that is good, without any pattern."""
    data = ROUTES[name](POLICY)
    file = scanned(tmp_path, name, data)
    assert file.structure.problems == ()
    found = {t.name.partition(":")[2]: t.shape for t in file.structure.tensors}
    assert all(found[key] == tuple(tensor.shape) for key, tensor in POLICY.items())
    assert outcome_in_run(tmp_path / "run", name, data) is Outcome.GOOD


@pytest.mark.parametrize("name", ROUTES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_inside_is_bad(tmp_path: Path, name: str, value: float) -> None:
    """Stored or packed."""
    sick = {**POLICY, "mlp.weight": torch.full((60, 20), value)}
    assert outcome_in_run(tmp_path / "run", name, ROUTES[name](sick)) is Outcome.BAD


@pytest.mark.parametrize("name", [name for name in ROUTES if not name.startswith("deflated")])
def test_a_cut_archive_is_not_good(tmp_path: Path, name: str) -> None:
    """A writer that was killed anywhere."""
    data = ROUTES[name](POLICY)
    for percent in (38, 70, 99):
        found = outcome_in_run(tmp_path / f"{percent}", name, data[: len(data) * percent // 100])
        assert found in (Outcome.BAD, Outcome.INCOMPLETE, Outcome.PENDING), percent


def test_a_cut_archive_that_does_not_say_what_it_is_is_reported(tmp_path: Path) -> None:
    """Its list of files is at its end, and its first file is compressed settings."""
    data = zip_of(baselines_files(POLICY), zipfile.ZIP_DEFLATED)
    (tmp_path / "agent_1.zip").write_bytes(data[: len(data) // 2])
    unread = look(str(tmp_path)).listing.not_understood
    assert unread is not None
    assert unread.paths == ("agent_1.zip",)


def test_roles_are_those_of_the_files(tmp_path: Path) -> None:
    """An optimizer is known by the name of its file, or by its container in one."""
    files = [*baselines_files(POLICY), ("ent_coef_optimizer.pth", torch_bytes({"w": torch.ones(2)}))]
    files += [("last.ckpt", torch_bytes({"model": dict(POLICY), "optimizer": {"m": torch.ones(2)}}))]
    found = scanned(tmp_path, "model_1.zip", zip_of(files)).structure
    roles = assign_roles("model_1.zip", found.tensors, containers=found.containers, members=found.members)
    by_name = dict(zip((t.name for t in found.tensors), roles, strict=True))
    assert by_name["policy.pth:mlp.weight"] == "model"
    assert by_name["policy.optimizer.pth:state.0.exp_avg"] == "optimizer"
    assert by_name["ent_coef_optimizer.pth:w"] == "optimizer"
    assert (by_name["last.ckpt:model.mlp.bias"], by_name["last.ckpt:optimizer.m"]) == ("model", "optimizer")


def contents_of_zip(data: bytes) -> dict[str, bytes] | None:
    """What Python's own reader finds; None if that is not all there."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return {name: archive.read(name) for name in archive.namelist()}
    except Exception:
        return None


@pytest.mark.parametrize("how", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_flipped_bit_in_a_zip_is_found(tmp_path: Path, how: int) -> None:
    """Either it is a problem, or Python's reader finds every file as it was."""
    data = zip_of(baselines_files(POLICY), how)
    whole, chance = contents_of_zip(data), random.Random(22)
    for _ in range(400):
        damaged = bytearray(data)
        damaged[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        file = scanned(tmp_path, "agent.zip", bytes(damaged))
        if not file.structure.problems and file.structure.format == "zip":
            assert contents_of_zip(bytes(damaged)) == whole


def test_a_flipped_bit_in_a_tensor_of_a_tar_is_found(tmp_path: Path) -> None:
    """By the checksums of torch's archive inside."""
    data = nemo_tar(POLICY)
    good = scanned(tmp_path, "a.nemo", data)
    for span in good.structure.spans:
        damaged = bytearray(data)
        damaged[span.offset + span.length // 2] ^= 8
        assert scanned(tmp_path, "a.nemo", bytes(damaged)).structure.problems


@pytest.mark.parametrize("flip", [False, True])
def test_the_checksum_of_a_file_covers_all_of_it(tmp_path: Path, flip: bool) -> None:
    """One pass adds up what lies in spans and between them, also beyond one block. One bit anywhere is seen."""
    large = safetensors_bytes({"w": torch.rand(300_000), "v": torch.rand(200_000)})
    data = bytearray(zip_of([("model.safetensors", large)]))
    places = [data.index(large), data.index(large) + len(large) // 2, data.index(large) + len(large) - 1]
    for place in places if flip else places[:1]:
        damaged = bytearray(data)
        damaged[place + (9 if place == places[0] else 0)] ^= flip
        found = scanned(tmp_path, "m.zip", bytes(damaged)).structure.problems
        assert bool(found) is flip


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    """A link."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def tar_with(*extra: tarfile.TarInfo | tuple[str, bytes], form: int = tarfile.GNU_FORMAT) -> bytes:
    """NeMo's files and these."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=form) as archive:
        for one in [*nemo_files(POLICY), *extra]:
            info = one if isinstance(one, tarfile.TarInfo) else tarfile.TarInfo(one[0])
            if not isinstance(one, tarfile.TarInfo):
                info.size = len(one[1])
            archive.addfile(info, io.BytesIO(b"" if isinstance(one, tarfile.TarInfo) else one[1]))
    return target.getvalue()


HOSTILE_TARS = {
    "upwards": tar_with(("../../evil.pth", b"x" * 2000)),
    "absolute": tar_with(("/etc/evil.pth", b"x" * 2000)),
    "link out": tar_with(link("policy.pth", "../../etc/passwd")),
    "hard link out": tar_with(link("policy.pth", "/etc/passwd", tarfile.LNKTYPE)),
    "twice": tar_with(("model_weights.ckpt", b"x" * 2000)),
    "another file": tar_with(("policy.pth", b"\x80\x02no pickle" * 300)),
}
HOSTILE_ZIPS = {
    "upwards": [("../../evil.pth", b"x" * 2000)],
    "absolute": [("/evil.pth", b"x" * 2000)],
    "backwards": [("a\\..\\..\\evil.pth", b"x" * 2000)],
    "no weights": [("policy2.pth", b"\0not torch's" * 300)],
    "empty weights": [("policy2.pth", b"")],
}


@pytest.mark.parametrize("kind", HOSTILE_TARS)
def test_tars_that_lead_out_are_bad(tmp_path: Path, kind: str) -> None:
    """Names and links out of the archive, two files of one name, files that are not what their names say."""
    assert outcome_in_run(tmp_path / "run", "a.nemo", HOSTILE_TARS[kind]) is Outcome.BAD


@pytest.mark.parametrize("digits", [19, 21, 5000])
def test_a_size_that_no_file_has_is_a_problem(tmp_path: Path, digits: int) -> None:
    """An extended header may state any number. Other checkpoints beside it are verified."""
    info = tarfile.TarInfo("policy.pth")
    info.pax_headers = {"size": "9" * digits}
    data = tar_with(info, form=tarfile.PAX_FORMAT)
    assert structure_of(tmp_path, "a.nemo", data).problems
    assert outcome_in_run(tmp_path / "run", "a.nemo", data) is not Outcome.GOOD


@pytest.mark.parametrize("kind", HOSTILE_ZIPS)
def test_zips_that_lead_out_are_bad(tmp_path: Path, kind: str) -> None:
    """The same for a zip."""
    data = zip_of([*baselines_files(POLICY), *HOSTILE_ZIPS[kind]])
    assert outcome_in_run(tmp_path / "run", "agent_1.zip", data) is Outcome.BAD


def test_overlapping_files_are_a_problem(tmp_path: Path) -> None:
    """Two names for the same bytes."""
    data = bytearray(zip_of(baselines_files(POLICY)))
    last = data.rindex(b"PK\x01\x02")
    struct.pack_into("<I", data, last + 42, 0)
    assert structure_of(tmp_path, "a.zip", bytes(data)).problems


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_every_kind_of_tar_is_read(tmp_path: Path, form: int) -> None:
    """Long names, large numbers, folders and links inside are no problem."""
    long = "a" * 90 + "/" + "b" * 90 + ".pth"
    data = tar_with((long, torch_bytes(dict(POLICY))), link("last.txt", "model_config.yaml"), form=form)
    found = structure_of(tmp_path, "a.nemo", data)
    assert found.problems == ()
    assert f"{long}:mlp.weight" in {t.name for t in found.tensors}


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("nested.zip", zip_of([("a.pth", torch_bytes(dict(POLICY))), ("inner.nemo", nemo_tar(POLICY))])),
        ("nested.tar", tar_of([("a.pth", torch_bytes(dict(POLICY))), ("inner.keras", keras_zip(np.ones((2, 2))))])),
        ("zip.zip", zip_of([("a.pth", torch_bytes(dict(POLICY))), ("inner.zip", baselines_zip(POLICY))])),
        ("tar.tar", tar_of([("a.pth", torch_bytes(dict(POLICY))), ("x", tar_of([("w.pth", torch_bytes({}))]))])),
        ("gz.zip", zip_of([("a.pth", torch_bytes(dict(POLICY))), ("x.gz", nemo_tar(POLICY, compressed=True))])),
        ("links.tar", tar_with(link("policy.pth", "model_weights.ckpt"))),
        ("pieces.tar", tar_of([("a.pth", torch_bytes(dict(POLICY))), ("__0_0.distcp", bytes(5000))])),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_state_that_is_not_read_keeps_it_from_being_good(tmp_path: Path, name: str, data: bytes) -> None:
    """An archive in an archive, a link in place of a file, pieces: it is named, and no alarm."""
    found = structure_of(tmp_path, name, data)
    assert len(found.not_understood) == 1
    assert found.problems == ()
    assert outcome_in_run(tmp_path / "run", name, data) is Outcome.SUSPECT


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("logs.zip", zip_of([("a.txt", b"loss\n" * 900)])),
        ("code.zip", zip_of([("a.py", b"x = 1\n" * 900)], zipfile.ZIP_DEFLATED)),
        ("data.tar", tar_of([("1.jpg", b"\xff\xd8\xff" + bytes(4000))])),
        ("data.tar.gz", gzip.compress(tar_of([("1.jpg", b"\xff\xd8\xff" + bytes(4000))]))),
        ("x.zip", b"PK\x03\x04 cut"),
        ("x.gz", gzip.compress(bytes(9000))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_archives_without_state_are_no_alarm(tmp_path: Path, name: str, data: bytes) -> None:
    """They stay what they were: bytes."""
    assert (structure_of(tmp_path, name, data).format, structure_of(tmp_path, name, data).problems) == ("opaque", ())


def test_what_unpacks_to_very_much_is_not_unpacked(tmp_path: Path) -> None:
    """A bomb is not good, and costs nothing."""
    bomb = zip_of([("model.pth", bytes(80 << 20))], zipfile.ZIP_DEFLATED)
    found = structure_of(tmp_path, "bomb.zip", bomb)
    assert found.not_understood == ("model.pth",)
    found = structure_of(tmp_path, "bomb.nemo", gzip.compress(bytes(200 << 20), 1))
    assert found.not_understood


class Armed:
    """Loading it would run a command."""

    def __reduce__(self) -> tuple[object, ...]:
        import os

        return os.system, ("exit 1",)


@pytest.mark.parametrize("how", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_pickles_inside_are_read_and_not_run(tmp_path: Path, how: int) -> None:
    """Those of the settings, too: stable-baselines3 loads them by cloudpickle."""
    armed = pickle.dumps(Armed(), 2)
    for number, files in enumerate((
        baselines_files(POLICY, armed),
        [*baselines_files(POLICY), ("extra.pkl", armed)],
        [*baselines_files(POLICY), ("critic.pth", torch_bytes({"a": Armed()}))],
        [("data", baselines_data(b"\x80\x04nonsense")), *baselines_files(POLICY)[1:]],
    )):  # fmt: skip
        assert outcome_in_run(tmp_path / f"{number}", "agent_1.zip", zip_of(files, how)) is Outcome.BAD
