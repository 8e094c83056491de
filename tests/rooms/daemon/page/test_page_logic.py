"""The page's decisions hold their laws, run by Node without a browser."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import ckptguard_daemon
import pytest

SCRIPTS = Path(ckptguard_daemon.__file__).parent / "page" / "js"
NODE = shutil.which("node")


@pytest.mark.skipif(NODE is None, reason="needs Node, which runs JavaScript (Debian: nodejs)")
def test_the_decisions_of_the_page_hold_their_laws(tmp_path: Path) -> None:
    """Numbers that are none, curves after rollbacks, marks of a timeline, and the order of the fleet."""
    assert NODE is not None
    # Outside the package nothing says that a .js file is a module.
    page = tmp_path / "js"
    shutil.copytree(SCRIPTS, page)
    (page / "package.json").write_text('{"type": "module"}')
    script = Path(__file__).with_name("page_logic.mjs")
    done = subprocess.run([NODE, script, page], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
