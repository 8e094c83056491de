"""What torch writes for a sharded save is hashed on its way, and a disk that refuses it is named."""

import errno
from pathlib import Path

import pytest
import torch
from blake3 import blake3

from ckptguard.training.sharded.dcp_plan import HashingWriter

pytestmark = pytest.mark.torch


def test_what_is_written_is_hashed(tmp_path):
    """Under the name that the file has in the end."""
    writer = HashingWriter(str(tmp_path))
    with writer.fs.create_stream(tmp_path / "a.tmp", "wb") as stream:
        torch.save(torch.arange(100_000), stream)
    writer.fs.rename(tmp_path / "a.tmp", tmp_path / "a")
    assert writer.digests == {"a": blake3((tmp_path / "a").read_bytes()).hexdigest()}


def test_a_full_disk_is_what_is_raised(tmp_path):
    """Not that torch's archive ends where it should not."""
    writer = HashingWriter(str(tmp_path))
    with (
        pytest.raises(OSError, match="No space left") as caught,
        writer.fs.create_stream(Path("/dev/full"), "wb") as stream,
    ):
        torch.save(torch.zeros(100_000), stream)
    assert caught.value.errno == errno.ENOSPC
    assert writer.digests == {}
