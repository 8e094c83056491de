"""Small texts beside weights, under names that promise tensors: SpeechBrain's ``counter.ckpt`` is the text ``2``."""

import pickle
from pathlib import Path

import pytest
import torch
from support.layouts import moments, weights
from support.runs import QUICK

from ckptguard.runs.results import Checked
from ckptguard.values.verdict import Outcome, Severity
from ckptguard.verification.target import Selection, verify_target

FOLDER = "CKPT+2026-01-02+03-04-05+00"


def judged(run: Path) -> Checked:
    """The one checkpoint of a run."""
    (checked,) = verify_target(str(run), QUICK, Selection(wait=0)).checkpoints
    return checked


def saved(run: Path, **more: bytes) -> Path:
    """A folder as SpeechBrain writes it, with more files."""
    folder = run / FOLDER
    folder.mkdir(parents=True)
    torch.save(weights(1), folder / "net.ckpt")
    torch.save(moments(1), folder / "optimizer.ckpt")
    (folder / "CKPT.yaml").write_text("# yamllint disable\nepoch: 2\nunixtime: 1.5\n")
    for name, raw in more.items():
        (folder / f"{name}.ckpt").write_bytes(raw)
    return folder


def test_a_text_beside_weights_is_good_and_compared(tmp_path):
    """It has a digest like any other file, and a changed one is told of."""
    folder = saved(tmp_path, counter=b"2", brain=b"avg_loss: 0.5\nsteps: 12\n", label_encoder="'ä' => 0\n".encode())
    checked = judged(tmp_path)
    assert (checked.outcome, [f for f in checked.findings if f.severity is not Severity.NOTICE]) == (Outcome.GOOD, [])
    (folder / "counter.ckpt").write_bytes(b"3")
    assert judged(tmp_path).outcome is Outcome.BAD


WHOLE = b"PK\3\4" + bytes(400)
NO_TEXT = {
    "nothing": b"",
    "zeros": bytes(400),
    "one zero": b"\0",
    "an archive's beginning": WHOLE[:40],
    "its first letters": b"PK",
    "a pickle's beginning": pickle.dumps({"a": 1.5}, 4)[:9],
    "a pickle of protocol 0": pickle.dumps({"a": 1.5}, 0),
    "half of one": pickle.dumps({"a": 1.5}, 0)[:9],
    "an object of protocol 0": pickle.dumps(torch.device("cpu"), 0)[:30],
    "a number of protocol 0": pickle.dumps(1.5, 0),
    "a page": b"<!DOCTYPE html><title>404</title>",
    "a pointer of git": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
    "no text": b"\xff\xfe\1\2\3\4" * 9,
    "a long text": b"a" * (2 << 20),
}


@pytest.mark.parametrize("kind", sorted(NO_TEXT))
def test_what_stands_for_an_archive_is_never_good(kind, tmp_path):
    """Cut short, zeroed, a pickle, or what a failed download leaves."""
    saved(tmp_path, counter=NO_TEXT[kind])
    assert judged(tmp_path).outcome in (Outcome.BAD, Outcome.INCOMPLETE, Outcome.PENDING)


@pytest.mark.parametrize("name", ["model", "optimizer", "ema", "adapter_model", "pytorch_model"])
def test_a_text_in_the_place_of_state_is_never_good(name, tmp_path):
    """Its name promises weights or moments, and nothing else will do."""
    saved(tmp_path, **{name: b"2"})
    assert judged(tmp_path).outcome in (Outcome.BAD, Outcome.INCOMPLETE)


def test_a_text_alone_is_never_good(tmp_path):
    """Beside nothing, and as a checkpoint of its own."""
    folder = tmp_path / "a" / FOLDER
    folder.mkdir(parents=True)
    (folder / "counter.ckpt").write_bytes(b"2")
    (tmp_path / "b").mkdir()
    (tmp_path / "b/net-5.pt").write_bytes(b"hello world, this is no tensor file")
    for run in ("a", "b"):
        report = verify_target(str(tmp_path / run), QUICK, Selection(wait=0))
        assert report.outcome is not Outcome.GOOD
        assert all(c.outcome is not Outcome.GOOD for c in report.checkpoints)
