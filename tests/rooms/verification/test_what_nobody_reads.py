"""What nobody can read is never good by itself, whichever way it is looked at."""

import hashlib
import io
import os
import random
import shutil
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.runs import QUICK, state_dict
from support.views import look

import ckptguard
from ckptguard.errors import NoKnownGoodError
from ckptguard.records.incidents import list_incidents
from ckptguard.replicas.replicate import replicate
from ckptguard.reporting.incidents_of_saves import IncidentsOfSaves
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.upkeep.settle_kept import protect, waiting_alone
from ckptguard.values.patterns import Pattern
from ckptguard.values.verdict import Outcome
from ckptguard.verification.kept_copy import verify_kept
from ckptguard.verification.target import verify_target
from ckptguard.verification.user_decisions import clear


def cut_zip() -> bytes:
    """A zip of two files, cut to 38 %."""
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as archive:
        archive.writestr("data", "{}")
        archive.writestr("policy.pth", random.Random(1).randbytes(9000))
    return whole.getvalue()[: len(whole.getvalue()) * 38 // 100]


CONTENTS = {
    "random": random.Random(2).randbytes(5000),
    "nothing": b"",
    "zeros": bytes(5000),
    "text": b"loss 0.5\n" * 400,
    "cut zip": cut_zip(),
    "HDF5": b"\x89HDF\r\n\x1a\n" + b"\xff\xc0" * 4000,
    "msgpack": b"\x82\xa6params\x81\xa1w\xc7\x10\x01" + bytes(3000),
    "GGUF": b"GGUF\x03\0\0\0" + bytes(3000),
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
    [found] = reconcile(look(str(root), SETTINGS), PassNotes()).checked
    return found.outcome


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
    """Under any name, any content, on any path to a verdict. It is no alarm either, and never known-good."""
    for number, name in enumerate(NAMES):
        root = tmp_path / str(number) / "run"
        root.mkdir(parents=True)
        path = root / name.format(500)
        path.write_bytes(CONTENTS[content])
        assert way(root, path) in (Outcome.SUSPECT, Outcome.PENDING), name
        with pytest.raises(NoKnownGoodError):
            find_known_good(look(str(root), SETTINGS).run)
        assert list_incidents(look(str(root), SETTINGS).run) == []


def test_it_is_no_incident(tmp_path: Path) -> None:
    """A healthy trainer of another framework opens none with each save."""
    (tmp_path / "model-500.weights.h5").write_bytes(CONTENTS["HDF5"])
    view = look(str(tmp_path), SETTINGS)
    [found] = reconcile(view, PassNotes()).checked
    with IncidentsOfSaves(SETTINGS, source="daemon", log=lambda *a, **k: None) as incidents:
        incidents.judged(view.run, found)
    assert list_incidents(view.run) == []


def saved(root: Path) -> Path:
    """A run with one save that nobody can read."""
    root.mkdir()
    path = root / "model-500.weights.h5"
    path.write_bytes(CONTENTS["HDF5"])
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
