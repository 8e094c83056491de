"""The README: short, and the first thing to type is the first thing to see."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_first_blocks_are_installing_and_the_two_commands():
    """Who opens the README sees at once what to type."""
    before, install, between, block = re.split(r"^```", TEXT, flags=re.MULTILINE)[:4]
    commands = [[line.split("#")[0].strip() for line in text.splitlines()[1:]] for text in (install, block)]
    assert commands == [
        ["pip install .", "pip install '.[s3]'"],
        ["python dev.py demo", "python dev.py test"],
    ]
    assert (before + install + between).count("\n") < 40


def test_it_is_short():
    """It has at most 150 lines."""
    assert TEXT.count("\n") <= 150


def test_the_torch_that_is_installed_is_the_one_told():
    """The README and dev.py name the same torch."""
    assert '"CKPTGUARD_TORCH", "torch==2.13.0"' in (ROOT / "dev.py").read_text(encoding="utf-8")
    assert "`torch==2.13.0`" in TEXT
