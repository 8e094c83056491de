"""What the tests of hostile files share."""

from pathlib import Path

import pytest
import torch
from support.format_files import torch_bytes


@pytest.fixture
def benign(tmp_path: Path) -> Path:
    """A file to begin with."""
    path = tmp_path / "benign.pt"
    path.write_bytes(torch_bytes({"w": torch.ones(2)}))
    return path
