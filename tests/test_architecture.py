"""The house's floors, checked from the source text alone: nothing is imported here."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"ckptguard": ROOT / "ckptguard", "ckptguard_daemon": ROOT / "daemon" / "ckptguard_daemon"}
# Lowest first. The doors share the last floor and never import each other.
FLOORS = ("pure", "storage", "formats", "layouts", "records", "scan", "checks", "operations")
DOORS = ("training", "integrations", "cli", "daemon")
NO_TORCH = {*FLOORS, "cli", "daemon"}
BANNED_WORDS = {"utils", "util", "common", "core", "helpers", "helper"}
BANNED_CLASSES = re.compile(r"(Manager|Handler|Helper|Processor)(?![a-z])")
# An integration is the guard's callback for one framework, so it stands on the training door.
ALLOWED_SIDEWAYS = {("integrations", "training")}
MAX_LINES = 400


def source_files() -> list[Path]:
    """Every Python file of the two packages."""
    return sorted(p for folder in PACKAGES.values() for p in folder.rglob("*.py"))


def module_name(path: Path) -> str:
    """The dotted name of a source file."""
    for package, folder in PACKAGES.items():
        if path.is_relative_to(folder):
            parts = path.relative_to(folder).with_suffix("").parts
            return ".".join((package, *(p for p in parts if p != "__init__")))
    raise AssertionError(path)


def floor_of(module: str) -> str:
    """The floor that a dotted module name of ours belongs to."""
    parts = module.split(".")
    if parts[0] == "ckptguard_daemon":
        return "daemon"
    if len(parts) > 1 and (PACKAGES["ckptguard"] / parts[1]).is_dir():
        return parts[1]
    return "pure"


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute module name) of every import anywhere in a file, those under TYPE_CHECKING too."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join((*base, *filter(None, [node.module])))
            # `from package import name` may import the submodule `name`.
            yield from ((node.lineno, submodule_or(module, alias.name)) for alias in node.names)


def submodule_or(module: str, name: str) -> str:
    """`module.name` where that is a module of ours, else `module`."""
    first, *rest = f"{module}.{name}".split(".")
    if first in PACKAGES:
        place = PACKAGES[first].joinpath(*rest)
        if place.is_dir() or place.with_suffix(".py").is_file():
            return f"{module}.{name}"
    return module


def may_import(importer: str, imported: str) -> bool:
    """The one rule: a module imports its own folder and lower floors; doors never import each other."""
    if importer == imported or (importer, imported) in ALLOWED_SIDEWAYS:
        return True
    if imported in DOORS:
        return False
    return importer in DOORS or FLOORS.index(imported) < FLOORS.index(importer)


def test_modules_import_only_their_own_and_lower_floors() -> None:
    """A module imports its own folder and lower floors, never up and never sideways between doors."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {floor_of(module_name(path))} imports {name}"
        for path in source_files()
        if path.name not in ("__init__.py", "__main__.py") or floor_of(module_name(path)) == "daemon"
        for line, name in imports(path)
        if name.split(".")[0] in PACKAGES and not may_import(floor_of(module_name(path)), floor_of(name))
    ]
    assert wrong == []


def test_every_folder_stands_on_a_known_floor() -> None:
    """A new folder must be given its floor here before it may exist."""
    folders = {p.name for p in PACKAGES["ckptguard"].iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert folders <= {*FLOORS, *DOORS}


def test_no_torch_below_the_training_side() -> None:
    """Formats, layouts, scan, checks, operations, CLI and daemon never import torch."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: imports {name}"
        for path in source_files()
        if floor_of(module_name(path)) in NO_TORCH
        for line, name in imports(path)
        if name.split(".")[0] in ("torch", "transformers", "safetensors", "accelerate")
    ]
    assert wrong == []


def test_pure_files_import_only_the_standard_library_and_msgspec() -> None:
    """Files directly in ckptguard/ stay free of third-party imports, msgspec excepted."""
    allowed = {"msgspec", *PACKAGES, *sys.stdlib_module_names}
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: imports {name}"
        for path in sorted(PACKAGES["ckptguard"].glob("*.py"))
        for line, name in imports(path)
        if name.split(".")[0] not in allowed
    ]
    assert wrong == []


def test_no_grab_bag_names() -> None:
    """No file or folder is called utils, common, core or helpers."""
    names = {part for path in source_files() for part in path.relative_to(ROOT).with_suffix("").parts}
    assert {n for n in names if set(n.strip("_").split("_")) & BANNED_WORDS} == set()


def test_no_class_is_named_for_being_vague() -> None:
    """No class is a Manager, Handler, Helper or Processor."""
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}: class {node.name}"
        for path in source_files()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and BANNED_CLASSES.search(node.name)
    ]
    assert wrong == []


@pytest.mark.parametrize("folder", ["ckptguard", "daemon", "tests", "examples"])
def test_no_file_is_long(folder: str) -> None:
    """No file has more than 400 lines."""
    long = {
        str(path.relative_to(ROOT)): lines
        for path in sorted((ROOT / folder).rglob("*.py"))
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > MAX_LINES
    }
    assert long == {}


def test_every_module_says_what_it_is() -> None:
    """Every module with code in it opens with a docstring."""
    silent = [
        str(path.relative_to(ROOT))
        for path in source_files()
        if path.read_text(encoding="utf-8").strip()
        and ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) is None
    ]
    assert silent == []


def test_every_test_has_its_sentence() -> None:
    """Every test function has a docstring that says what must hold."""
    silent = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}"
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and ast.get_docstring(node) is None
    ]
    assert silent == []
