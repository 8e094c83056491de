"""The README is kept by tests where it repeats what the code says."""

import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from ckptguard.cli.entry import COMMANDS
from ckptguard.values.settings import Settings
from ckptguard.values.storage_options import StorageOptions
from ckptguard.values.verdict import Outcome
from ckptguard.verification.target import verify_target

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_first_lines_are_the_two_commands():
    """Who opens the README sees at once what to type."""
    lines = [line for line in TEXT.splitlines() if line][1:4]
    assert [line.split("#")[0].strip() for line in lines] == ["```", "python dev.py demo", "python dev.py test"]


def test_the_table_of_settings_is_complete():
    """Every setting is in the table, in order, with its default."""
    table = TEXT.partition("## Settings")[2].partition("## Words")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) ?\|", table, re.MULTILINE))
    told = {name: tomllib.loads(f"x = {text}")["x"] if text else None for name, text in rows.items()}
    assert list(told.items()) == [(f.name, plain(f.default)) for f in msgspec.structs.fields(Settings)]


def plain(value):
    """A default as TOML would say it."""
    if isinstance(value, StorageOptions):
        return value.revealed() or None
    return list(value) if isinstance(value, tuple) else value


def test_every_command_is_named():
    """The table of commands names each of them."""
    table = TEXT.partition("## Commands")[2].partition("### Exit codes")[0]
    assert set(re.findall(r"`([a-z-]+)(?: [^`]*)?`", table)) >= set(COMMANDS)


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_somewhere(name):
    """Every relative link of the documents is a file of the repository."""
    text = (ROOT / name).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_python_examples_are_python():
    """The README's starts compile."""
    for block in re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE):
        compile(block, "README.md", "exec")


def test_the_torch_that_is_installed_is_the_one_told():
    """The README and dev.py name the same torch."""
    assert '"CKPTGUARD_TORCH", "torch==2.13.0"' in (ROOT / "dev.py").read_text(encoding="utf-8")
    assert "`torch==2.13.0`" in TEXT


class Tiny(torch.nn.Module):
    """A model that answers as the README's does: with a loss."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, batch):
        """The loss of a batch."""
        return SimpleNamespace(loss=self.layer(batch).square().mean())


def names():
    """What the README's starts take as given."""
    torch.manual_seed(0)
    model = Tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(torch.randn(32, 4), batch_size=4)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)

    def train_step(batch):
        loss = model(batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return {
        "torch": torch,
        "model": model,
        "optimizer": optimizer,
        "loader": loader,
        "scheduler": scheduler,
        "train_step": train_step,
    }


@pytest.mark.parametrize("heading", ["## Start: a plain loop", "## Start: a notebook, without a daemon"])
def test_the_starts_run(heading, tmp_path, monkeypatch):
    """The README's loops, shortened, train and leave verifiable checkpoints, and resume where they ended."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CKPTGUARD_SETTLE", "0")
    [block] = re.findall(
        r"^```python\n(.*?)^```", TEXT.partition(heading)[2].partition("\n## ")[0], re.DOTALL | re.MULTILINE
    )
    block = block.replace("10_000", "20").replace("1_000", "20").replace("500", "10").replace("=100)", "=10)")
    for _ in range(2):
        space = names()
        exec(compile(block, "README.md", "exec"), space)
        assert space["guard"].step == 20
        space["guard"].close()
    [run] = (tmp_path / "runs").iterdir()
    report = verify_target(str(run), Settings(settle=0))
    assert [c.step for c in report.checkpoints] == [0, 10, 20]
    assert report.outcome is Outcome.GOOD
