"""Plugins as packages install them, without an installer: a module, and the metadata of its package."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from ckptguard.plugins.installed import installed


def plant(folder: Path, points: Sequence[tuple[str, str, str]], code: str, *, package: str = "others") -> None:
    """Install a package with these entry points: kind, name with the version, and function."""
    module = package.replace("-", "_")
    (folder / f"{module}.py").write_text(textwrap.dedent(code))
    metadata = folder / f"{module}-1.5.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.5\n")
    lines = [f"[ckptguard.{kind}]\n{name} = {module}:{function}\n" for kind, name, function in points]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    forget()


def forget() -> None:
    """Look again at what is installed."""
    importlib.invalidate_caches()
    installed.cache_clear()


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of packages that this process and those that it starts see."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    forget()
    yield folder
    forget()
