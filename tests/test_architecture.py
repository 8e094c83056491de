"""The house's floors, checked from the source text alone: nothing is imported here."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"ckptguard": ROOT / "ckptguard", "ckptguard_daemon": ROOT / "daemon" / "ckptguard_daemon"}
# Lowest first. A module imports its own room and rooms of lower floors; rooms of one floor never import each other.
FLOORS = (
    ("top",),  # errors, version
    ("values",),
    ("decisions", "storage"),
    ("formats", "records"),
    ("layouts", "scan"),
    ("plugins",),
    ("checks", "runs"),
    ("keep", "retention"),
    ("verification",),
    ("replicas",),
    ("inspect", "recover"),
    ("reporting",),
    ("repair",),
    ("upkeep",),
    ("engine",),
    ("catalogue", "fleet"),
    ("bulk",),
    ("documents",),
    ("terminal",),
    ("supervise", "training", "daemon"),
    ("integrations", "cli", "api"),
    ("testing",),  # the contract that is shipped for others' stores: nothing imports it
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
DOORS = {"supervise", "training", "daemon", "integrations", "cli", "api"}
# An integration is the guard's callback for one framework; supervise is a verb of the command line; load decodes what
# a guard saved.
ALLOWED_BETWEEN_DOORS = {("integrations", "training"), ("cli", "supervise"), ("api", "training")}
PURE = {"values", "decisions"}
MAY_USE_TORCH = {"training", "integrations", "api"}  # of the last only what load answers with
BANNED_WORDS = {"utils", "util", "common", "core", "helpers", "helper"}
BANNED_CLASSES = re.compile(r"(Manager|Handler|Helper|Processor)(?![a-z])")
# Where what tests share lies; elsewhere a helper lies beside the tests that launch it.
HOMES_OF_HELPERS = {
    "campaigns",
    "contracts",
    "docs",
    "faults/hostile",
    "fuzz",
    "servers",
    "support",
    "trainers/scripts",
}
TEST_IMPORT = re.compile(r"^[ \t]*(?:from|import)[ \t]+(?:[\w.]+\.)?((?:test_\w+|conftest)\b)", re.MULTILINE)


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


def room_of(module: str) -> str:
    """The room that a dotted module name of ours belongs to."""
    parts = module.split(".")
    if parts[0] == "ckptguard_daemon":
        return "daemon"
    if len(parts) > 1 and (PACKAGES["ckptguard"] / parts[1]).is_dir():
        return parts[1]
    return "top"


def folder_of(module: str) -> str:
    """The dotted name of the folder that a module lies in, or is."""
    first, *rest = module.split(".")
    place = PACKAGES[first].joinpath(*rest)
    return module if place.is_dir() else module.rpartition(".")[0]


def room_folder(module: str) -> str:
    """The dotted name of the folder of a module's room; the daemon's is its whole package."""
    first, *rest = module.split(".")
    return first if first == "ckptguard_daemon" else ".".join((first, *rest[:1]))


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
    """The one rule: a module imports its own room and lower floors; doors never import each other."""
    if importer == imported or (importer, imported) in ALLOWED_BETWEEN_DOORS:
        return True
    if importer in DOORS and imported in DOORS:
        return False
    return FLOOR[imported] < FLOOR[importer]


def our_imports() -> Iterator[tuple[Path, int, str, str]]:
    """(file, line, importing module, imported module) of every import of ours by ours."""
    for path in source_files():
        module = module_name(path)
        for line, name in imports(path):
            if name.split(".")[0] in PACKAGES:
                yield path, line, module, name


def test_modules_import_only_their_own_and_lower_floors() -> None:
    """A module imports its own room and lower floors, never up and never sideways."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {room_of(module)} imports {name}"
        for path, line, module, name in our_imports()
        if module not in ("ckptguard", "ckptguard.__main__") and not may_import(room_of(module), room_of(name))
    ]
    assert wrong == []


def test_every_folder_stands_on_a_known_floor() -> None:
    """A new room must be given its floor here before it may exist."""
    folders = {p.name for p in PACKAGES["ckptguard"].iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert folders == FLOOR.keys() - {"top", "daemon"}


def test_developers_read_of_the_same_floors() -> None:
    """CONTRIBUTING.md lists the rooms of each floor; the lowest are files, and the highest is for others' tests."""
    layers = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("```text\n")[2].partition("```")[0]
    assert [set(floor.split()) for floor in layers.split("|")[1:]] == [set(floor) for floor in FLOORS[1:-1]]


def test_only_the_daemon_asks_the_catalogue() -> None:
    """The catalogue is a cache of the daemon: known-good, the guard and the commands never ask it."""
    rooms = {room_of(module) for _, _, module, name in our_imports() if room_of(name) == "catalogue"}
    assert rooms <= {"catalogue", "daemon"}


def test_folders_of_a_room_form_no_circle() -> None:
    """The folders inside one room never import each other in a circle."""
    arrows: dict[str, set[str]] = {}
    for _, _, module, name in our_imports():
        importer, imported = folder_of(module), folder_of(name)
        inner = all(name not in (*PACKAGES, room_folder(name)) for name in (importer, imported))
        if inner and importer != imported and room_of(module) == room_of(name):
            arrows.setdefault(importer, set()).add(imported)
    assert arrows, "no room has folders that import each other: this test looks at nothing"
    assert list(TopologicalSorter(arrows).static_order())  # raises CycleError, which names the circle


def test_no_modules_form_a_circle() -> None:
    """No modules import each other in a circle, not even inside functions. Imports for annotations do not count."""
    arrows: dict[str, set[str]] = {}
    for path in source_files():
        module, left_out = module_name(path), only_for_annotations(path)
        for line, name in imports(path):
            if name.split(".")[0] in PACKAGES and name != module and line not in left_out:
                arrows.setdefault(module, set()).add(name)
    assert list(TopologicalSorter(arrows).static_order())  # raises CycleError, which names the circle


def only_for_annotations(path: Path) -> set[int]:
    """The lines under `if TYPE_CHECKING`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    blocks = (node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    return {line for block in blocks for line in range(block.lineno, (block.body[-1].end_lineno or block.lineno) + 1)}


def test_private_modules_stay_in_their_folder() -> None:
    """A file with a leading underscore is imported by its own folder only."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: imports {name}"
        for path, line, module, name in our_imports()
        if any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
        and folder_of(module) != folder_of(name)
    ]
    assert wrong == []


def test_torch_is_the_training_sides_alone() -> None:
    """Only the training side and the integrations import torch or a training framework."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: imports {name}"
        for path in source_files()
        if room_of(module_name(path)) not in MAY_USE_TORCH
        for line, name in imports(path)
        if name.split(".")[0] in ("torch", "transformers", "safetensors", "accelerate")
    ]
    assert wrong == []


def test_pure_rooms_import_only_the_standard_library_and_msgspec() -> None:
    """Values and decisions stay free of third-party imports, msgspec excepted, and so does the package's top."""
    allowed = {"msgspec", *PACKAGES, *sys.stdlib_module_names}
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: imports {name}"
        for path in source_files()
        if room_of(module_name(path)) in {*PURE, "top"}
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


# What removes something outside of any run: its own socket, lock, cache, page or catalogue, or a file it has just made.
REMOVES_ITS_OWN = {
    "ckptguard/catalogue/catalogue.py",
    "ckptguard/runs/run_reader.py",
    "ckptguard/storage/runtime_folder.py",
    "ckptguard/supervise/lock_file.py",
    "daemon/ckptguard_daemon/http/web_server.py",
    "daemon/ckptguard_daemon/http/unix_socket.py",
}


def test_one_module_removes_what_is_in_a_run() -> None:
    """Outside of storages and records, only `runs/removal.py` removes a file or folder of a run."""
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node.func)}"
        for path in source_files()
        if room_of(module_name(path)) not in {"storage", "records", "testing"}
        and str(path.relative_to(ROOT)) not in {"ckptguard/runs/removal.py", *REMOVES_ITS_OWN}
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and removes(node.func)
    ]
    assert wrong == []


def removes(call: ast.Attribute) -> bool:
    """Whether a method removes files: one of os, shutil and pathlib, or `remove` of a storage."""
    if call.attr == "remove":
        return re.search(r"(^|[._])(os|storage|records|inner)$", ast.unparse(call.value)) is not None
    return call.attr in {"unlink", "rmdir", "rmtree", "removedirs", "rm", "rm_file"}


def test_no_class_of_the_daemon_has_the_inside_of_a_server_as_its_base() -> None:
    """uvicorn, asyncio and h11 promise nothing of theirs."""
    inside = {"uvicorn", "asyncio", "h11"}
    found = []
    for path in sorted(PACKAGES["ckptguard_daemon"].rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = set(inside)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in inside:
                names |= {one.asname or one.name for one in node.names}
            elif isinstance(node, ast.Import):
                names |= {one.asname or "" for one in node.names if one.name.partition(".")[0] in inside}
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bases = {ast.unparse(base).partition(".")[0] for base in node.bases}
                found += [f"{path.name}: {node.name}"] if bases & names else []
    assert found == []


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


def test_no_test_imports_another() -> None:
    """What tests share lies in helper modules: no file of the tests imports a test or a conftest, nor does a script
    that one has as text."""
    wrong = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(alias.name for alias in node.names)]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names = TEST_IMPORT.findall(node.value)
            parts = {part for name in names for part in name.split(".")}
            wrong += [f"{path.relative_to(ROOT)}:{node.lineno}: {part}" for part in parts if is_test_module(part)]
    assert wrong == []


def is_test_module(name: str) -> bool:
    """Whether pytest collects a module of this name; a fixture or function of a helper may begin like one."""
    return name == "conftest" or (name.startswith("test_") and any((ROOT / "tests").rglob(f"{name}.py")))


def test_helpers_lie_where_they_are_looked_for() -> None:
    """A module of the tests that is no test lies in a folder of helpers, or beside tests that name it."""
    tests = ROOT / "tests"
    lost = []
    for path in sorted(tests.rglob("*.py")):
        if path.name.startswith("test_") or path.name == "conftest.py":
            continue
        if any(path.is_relative_to(tests / home) for home in HOMES_OF_HELPERS):
            continue
        beside = [*path.parent.glob("test_*.py"), *path.parent.glob("conftest.py")]
        named = any(re.search(rf"\b{path.stem}\b", test.read_text(encoding="utf-8")) for test in beside)
        if not named:
            lost.append(str(path.relative_to(ROOT)))
    assert lost == []


def test_every_campaign_is_marked() -> None:
    """What has a long form is run by `-m campaign`."""
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    unmarked = [
        str(path.relative_to(ROOT))
        for path in tests
        if path != Path(__file__).resolve()
        and ("campaigns" in path.parts or "CKPTGUARD_CAMPAIGN" in path.read_text(encoding="utf-8"))
        and "mark.campaign" not in path.read_text(encoding="utf-8")
    ]
    assert unmarked == []


# The Trainer and Lightning each have a callback, and their users import it from the package of their framework.
NAMED_TWICE = {"GuardCallback"}


def test_one_name_is_one_concept() -> None:
    """No two public classes have one name."""
    named: dict[str, list[str]] = {}
    for path in source_files():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                named.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    twice = {name: places for name, places in named.items() if len(places) > 1}
    assert {name: places for name, places in twice.items() if name not in NAMED_TWICE} == {}
    assert twice.keys() >= NAMED_TWICE, "a name that one class has now: take it out of the list"
