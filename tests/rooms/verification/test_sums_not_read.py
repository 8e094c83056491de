"""Checksum files that are not read, or not to their end: what they state is a question, and never good."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runs import QUICK, save_file, state_dict

from ckptguard.values.verdict import Outcome
from ckptguard.verification.checksum_files import LONGEST
from ckptguard.verification.target import verify_target

FIRST = "model.safetensors"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model in a folder of its own."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(state_dict(1), folder / FIRST)
    return folder


def test_a_list_of_noise_is_not_read_to_its_end(model):
    """Millions of lines of it would take minutes, and more memory than the weights."""
    (model / "SHA256SUMS").write_bytes(b"a\n" * (LONGEST // 2))
    report = verify_target(str(model), QUICK)
    assert (report.outcome, report.could_not_tell) == (Outcome.PENDING, True)
    assert "10,000 lines" in report.checkpoints[0].findings[0].message


def test_a_record_of_the_hub_that_is_a_link_is_not_followed(model, tmp_path):
    """What it says is not known, and the user is told what to fix."""
    (tmp_path / "elsewhere").mkdir()
    (model / ".cache").symlink_to(tmp_path / "elsewhere")
    report = verify_target(str(model / FIRST), QUICK)
    assert (report.outcome, report.could_not_tell) == (Outcome.PENDING, True)
    assert report.checkpoints[0].findings[0].message.startswith("the checksum file .cache/huggingface/download")
