"""What nobody can read is never good by itself, whichever way it is looked at."""

import hashlib
import io
import math
import os
import random
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.container_files import baselines_zip, gguf_bytes, hdf5_bytes, nemo_tar, tar_of, zip_of
from support.format_files import torch_bytes
from support.runs import QUICK, state_dict
from support.views import look

import ckptguard
from ckptguard.errors import NoKnownGoodError
from ckptguard.records.incidents import list_incidents
from ckptguard.replicas.replicate import replicate
from ckptguard.reporting.incidents_of_saves import IncidentsOfSaves
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.upkeep.finish_copies import protect, waiting_alone
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.patterns import Pattern
from ckptguard.values.verdict import Outcome
from ckptguard.verification.checkpoint import verify_kept
from ckptguard.verification.target import verify_target
from ckptguard.verification.user_decisions import clear


def flipped(data: bytes, where: bytes) -> bytes:
    """The same with one bit changed among these bytes."""
    place = data.index(where) + len(where) // 2
    return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]


def cut_zip() -> bytes:
    """A zip of two files, cut to 38 %."""
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as archive:
        archive.writestr("data", "{}")
        archive.writestr("policy.pth", random.Random(1).randbytes(9000))
    return whole.getvalue()[: len(whole.getvalue()) * 38 // 100]


POLICY = {"mlp.weight": torch.ones(40, 20)}
KERNEL = np.ones((40, 20), np.float32)
WEIGHTS = torch_bytes(POLICY)
# What is read, but not all of it, or what is damaged: by a writer that was killed, or by a single bit.
CONTAINERS = {
    "cut zip": cut_zip(),
    "cut baselines": baselines_zip(POLICY)[:-2000],
    "flipped baselines": flipped(baselines_zip(POLICY), WEIGHTS[2000:2040]),
    "weights in an archive in a zip": zip_of([("a.pth", WEIGHTS), ("b.nemo", nemo_tar(POLICY))]),
    "weights of another format in a zip": zip_of([("w_model.msgpack", bytes(range(256)) * 20)]),
    "cut tar": tar_of([("model.ckpt", WEIGHTS)])[:3000],
    "flipped tar": flipped(tar_of([("model.ckpt", WEIGHTS)]), WEIGHTS[2000:2040]),
    "cut compressed tar": nemo_tar(POLICY, compressed=True)[:-40],
    "linked tar": tar_of([("model.ckpt", WEIGHTS), ("b.distcp", bytes(range(256)) * 9)]),
    "GGUF of an unknown type": gguf_bytes({"w": KERNEL}).replace(b"\0\0\0\0" + bytes(8), struct.pack("<IQ", 99, 0)),
    "cut GGUF": gguf_bytes({"w": KERNEL})[:-900],
    "sick GGUF": gguf_bytes({"w": KERNEL * math.nan}),
    "cut HDF5": hdf5_bytes({"layers/w": KERNEL})[:-900],
    "sick HDF5": hdf5_bytes({"layers/w": KERNEL * math.nan}, compression="gzip"),
    "HDF5 of records": hdf5_bytes({"layers/w": np.ones(900, [("a", "f4"), ("b", "f4")])}),
    "HDF5": b"\x89HDF\r\n\x1a\n" + b"\xff\xc0" * 4000,
    "GGUF": b"GGUF\x03\0\0\0" + bytes(3000),
}
CONTENTS = {
    **CONTAINERS,
    "joblib": b"\x78\x9c" + random.Random(3).randbytes(4000),
    "ONNX": b"\x08\x09\x12\x07pytorch" + random.Random(4).randbytes(4000),
    "random": random.Random(2).randbytes(5000),
    "nothing": b"",
    "zeros": bytes(5000),
    "text": b"loss 0.5\n" * 400,
    "msgpack": b"\x82\xa6params\x81\xa1w\xc7\x10\x01" + bytes(3000),
    "ubjson": b"{L\0\0\0\0\0\0\0\x07learner{" + bytes(3000),
    "compressed": zlib.compress(bytes(range(256)) * 20),
}
NAMES = ("model-{}.weights.h5", "ckpt_{}.msgpack", "agent_{}_steps.zip", "g_{:08d}", "booster-{}.json", "w{}.log")
PATTERNS = tuple(Pattern(path=glob) for glob in ("model-*", "ckpt_*", "agent_*", "g_*", "booster-*", "w*.log"))
SETTINGS = QUICK.changed(patterns=PATTERNS, keep="link")


def in_run(root: Path, path: Path) -> Outcome:
    """`verify RUN`."""
    [found] = verify_target(str(root), SETTINGS).checkpoints
    return found.outcome


def in_a_pass(root: Path, path: Path) -> Outcome:
    """The daemon's pass."""
    done = reconcile(look(str(root), SETTINGS), PassNotes())
    assert len(done.checked) + len(done.pending) == 1
    return done.checked[0].outcome if done.checked else Outcome.PENDING


def alone(root: Path, path: Path) -> Outcome:
    """`verify FILE`, in a folder that is no run."""
    [found] = verify_target(str(path), QUICK).checkpoints
    return found.outcome


def as_kept_copy(root: Path, path: Path) -> Outcome:
    """The trainer deleted it before its verdict, so its copy is judged."""
    view = look(str(root), SETTINGS)
    assert protect(view, [(c, True) for c in view.checkpoints]) == []
    path.unlink()
    [copy] = waiting_alone(look(str(root), SETTINGS))
    found = verify_kept(look(str(root), SETTINGS), copy)
    assert found is not None
    return found.outcome


def again(root: Path, path: Path) -> Outcome:
    """The second time its own seal is there: that is what was seen, and nobody's word."""
    in_run(root, path)
    return in_run(root, path)


def in_a_replica(root: Path, path: Path) -> Outcome:
    """A copy of the run with its records."""
    in_run(root, path)
    shutil.copytree(root, root.with_name("replica"))
    return in_run(root.with_name("replica"), path)


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("way", [in_run, in_a_pass, alone, as_kept_copy, again, in_a_replica])
def test_it_is_never_good(tmp_path: Path, way: Callable[[Path, Path], Outcome], content: str) -> None:
    """Under any name, any content, on any path to a verdict, and never known-good. It is bad only if it is damaged, or
    not what its name promises."""
    for number, name in enumerate(NAMES):
        root = tmp_path / str(number) / "run"
        root.mkdir(parents=True)
        path = root / name.format(500)
        path.write_bytes(CONTENTS[content])
        promised = content in CONTAINERS or name.endswith((".weights.h5", ".json"))
        bad = (Outcome.BAD, Outcome.INCOMPLETE) if promised else ()
        assert way(root, path) in (Outcome.SUSPECT, Outcome.PENDING, *bad), name
        with pytest.raises(NoKnownGoodError):
            find_known_good(look(str(root), SETTINGS).run)
        assert list_incidents(look(str(root), SETTINGS).run) == []


def test_it_is_no_incident(tmp_path: Path) -> None:
    """A healthy trainer of another framework opens none with each save."""
    (tmp_path / "ckpt_500.msgpack").write_bytes(CONTENTS["msgpack"])
    view = look(str(tmp_path), SETTINGS)
    [found] = reconcile(view, PassNotes()).checked
    with IncidentsOfSaves(SETTINGS, source="daemon", log=lambda *a, **k: None) as incidents:
        incidents.judged(view.run, found)
    assert list_incidents(view.run) == []


def saved(root: Path) -> Path:
    """A run with one save that nobody can read."""
    root.mkdir()
    path = root / "ckpt_500.msgpack"
    path.write_bytes(CONTENTS["msgpack"])
    return path


def vouched_by_list(root: Path, path: Path) -> None:
    """A list of checksums lies beside it."""
    (root / "SHA256SUMS").write_text(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n")


def vouched_by_program(root: Path, path: Path) -> None:
    """The program that wrote it seals it."""
    assert ckptguard.seal(path, run=root, settings=SETTINGS)


def vouched_by_user(root: Path, path: Path) -> None:
    """A user looked at it."""
    in_run(root, path)
    clear(look(str(root), SETTINGS), path.name, reason="loaded and evaluated")


@pytest.mark.parametrize("vouch", [vouched_by_list, vouched_by_program, vouched_by_user])
def test_what_somebody_vouches_for_is_good_until_it_changes(
    tmp_path: Path, vouch: Callable[[Path, Path], None]
) -> None:
    """Also when it is read again, and in a replica. A flipped byte is found."""
    root = tmp_path / "run"
    path = saved(root)
    vouch(root, path)
    assert [in_run(root, path), in_run(root, path)] == [Outcome.GOOD] * 2
    assert Path(find_known_good(look(str(root), SETTINGS).run).path) == path
    replica = tmp_path / "replica"
    replicate(look(str(root), SETTINGS), str(replica))
    (root / "SHA256SUMS").unlink(missing_ok=True)
    assert in_run(root, path) is Outcome.GOOD
    assert in_run(replica, replica / path.name) is Outcome.GOOD
    before = os.stat(path)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert in_run(root, path) is Outcome.BAD


def test_unread_files_beside_weights_do_not_matter(tmp_path: Path) -> None:
    """Other frameworks' copies of a model lie beside its weights. Without the weights they keep it from being good."""
    folder = tmp_path / "checkpoint-500"
    folder.mkdir()
    (folder / "flax_model.msgpack").write_bytes(CONTENTS["msgpack"])
    torch.save({"state": {0: {"exp_avg": torch.ones(4)}}}, folder / "optimizer.pt")
    torch.save(state_dict(1), folder / "pytorch_model.bin")
    assert verify_target(str(tmp_path), QUICK).outcome is Outcome.GOOD
    shutil.rmtree(tmp_path / "_ckptguard")
    (folder / "pytorch_model.bin").unlink()
    assert verify_target(str(tmp_path), QUICK).outcome is not Outcome.GOOD
    (folder / "flax_model.msgpack").rename(folder / "loss.png")
    shutil.rmtree(tmp_path / "_ckptguard")
    assert verify_target(str(tmp_path), QUICK).outcome is Outcome.GOOD
