"""Try ckptguard with old and new versions of what it works with, and write the table of docs/reference/versions.md.

    python dev.py matrix [--keep FOLDER] [--part PART] [ROW ...]

Each row gets an environment of its own in the folder for temporary files (TMPDIR), of up to 7 GB, which is removed
after it; with --keep they stay in a folder and are used again. Only the cells that were tried are written. A row that
cannot be installed says why.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/reference/versions.md"
# What the tests import themselves. The readers of formats whose library is missing are skipped.
TESTED_BY = ("pytest", "pytest-timeout", "hypothesis", "httpx2", "safetensors", "gguf", "h5py", "msgpack", "torchdata")
ROOMS, WRITERS = "tests/rooms", "tests/contracts/writers"
# The columns: what is tried, and by which tests.
PARTS = {
    "readers": (
        *(f"{ROOMS}/formats/test_{name}.py" for name in ("torch_tensors", "dcp", "legacy_files", "numpy_files")),
        f"{ROOMS}/formats/test_whole_modules.py",
        "tests/contracts/test_format_contract.py",
    ),
    "guard": (
        *(f"{ROOMS}/training/test_{name}.py" for name in ("saving", "loading", "sickness", "several_ranks")),
        *(f"{ROOMS}/training/test_{name}.py" for name in ("exactness", "loader")),
        f"{ROOMS}/api/test_load.py",
    ),
    "Trainer": (f"{ROOMS}/integrations/test_transformers_train.py", f"{WRITERS}/test_hf_trainer_runs.py"),
    "Accelerate": (f"{ROOMS}/integrations/test_accelerate_guard.py", f"{WRITERS}/test_accelerate_runs.py"),
    "Lightning": (f"{ROOMS}/integrations/test_frameworks.py::test_lightning", f"{WRITERS}/test_lightning_runs.py"),
    "DeepSpeed": (
        f"{ROOMS}/integrations/test_frameworks.py::test_two_ranks_of_deepspeed",
        f"{WRITERS}/test_deepspeed_runs.py",
    ),
    "stores": (f"{ROOMS}/storage", "tests/contracts/test_local_storage.py", "tests/contracts/test_remote_storage.py"),
    "daemon": (f"{ROOMS}/daemon/http", f"{ROOMS}/daemon/dashboard"),
}
TORCH = ("readers", "guard")
FRAMEWORKS = (*TORCH, "Trainer", "Accelerate", "Lightning", "DeepSpeed")


class Row(NamedTuple):
    """A Python, what is installed for it, and the parts that are tried."""

    python: str
    pins: tuple[str, ...]
    parts: tuple[str, ...]


def oldest(requirements: list[str]) -> tuple[str, ...]:
    """These requirements, each at its lower bound."""
    return tuple(re.sub(r">=([^,; ]+)(,[^; ]+)?", r"==\1", wanted) for wanted in requirements)


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OURS = PROJECT["dependencies"]
TORCH_OF_TESTS = os.environ.get("CKPTGUARD_TORCH", "torch==2.13.0")  # as dev.py has it
NEWEST = ("torch", "transformers", "peft", "lightning", "accelerate", "deepspeed")
THEIRS = [
    wanted
    for extra in ("test", "writers")
    for wanted in PROJECT["optional-dependencies"][extra]
    if wanted.partition(">")[0] in NEWEST
]
# Prints the Python of a row and the packages whose versions its line names.
SHOWN = ("torch", "transformers", "peft", "lightning", "accelerate", "deepspeed", "fsspec", "starlette", "numpy")
VERSIONS = f"""
import importlib.metadata, platform
print(platform.python_version())
for name in {SHOWN}:
    try:
        print(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        pass
"""
OLDER = ("torch==2.6.*", "transformers==4.46.*", "peft", "lightning==2.4.*", "accelerate==1.1.*", "deepspeed==0.16.*")
ROWS = {
    "oldest requirements": Row("3.11", (TORCH_OF_TESTS, *oldest(OURS)), ("readers", "stores", "daemon")),
    "torch 2.4": Row("3.11", ("torch==2.4.*",), TORCH),
    "older frameworks": Row("3.11", OLDER, FRAMEWORKS),
    "oldest frameworks": Row("3.12", ("torch==2.8.*", *oldest(THEIRS)), FRAMEWORKS),
    "torch 2.10": Row("3.13", ("torch==2.10.*",), TORCH),
    "newest": Row("3.13", NEWEST, tuple(PARTS)),
    "Python 3.14": Row("3.14", NEWEST, tuple(PARTS)),
}


def main() -> int:
    """Try the rows that are named, or all, and write their cells. 1 where a test failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--part", action="append", choices=PARTS, help="try this part alone; may be given again")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where the environments stay")
    given = parser.parse_args()
    failed = False
    for name in given.rows or ROWS:
        with tempfile.TemporaryDirectory(prefix="ckptguard-matrix-") as temporary:
            home = (given.keep.resolve() if given.keep else Path(temporary)) / name.replace(" ", "-")
            for column, cell in tried(ROWS[name], home, given.part or tuple(PARTS)):
                print(f"{name}, {column}: {cell}", flush=True)
                write(name, column, cell)
                failed |= "failed" in cell
    return int(failed)


def tried(row: Row, home: Path, parts: Sequence[str] = tuple(PARTS)) -> Iterator[tuple[str, str]]:
    """Make the environment of a row, and run its tests: the columns of its line, each with what stands there."""
    try:
        python = environment(row, home)
    except subprocess.CalledProcessError as error:
        reasons = re.findall(r"^(?:ERROR: )?(.*\w.*)$", f"{error.stderr}", re.MULTILINE)
        yield from (("Python", row.python), ("with", f"not tried: {reasons[-1] if reasons else error}"))
        return
    version, *packages = asked(python, VERSIONS).splitlines()
    yield from (("Python", version), ("with", ", ".join(packages)))
    for part in row.parts:
        if part in parts:
            yield part, counts(python, home, PARTS[part])


def environment(row: Row, home: Path) -> Path:
    """Make it, and return its Python. CalledProcessError where the Python or a package cannot be had."""
    interpreter = f"python{row.python}"
    if shutil.which(interpreter) is None:
        raise subprocess.CalledProcessError(127, interpreter, stderr=f"there is no {interpreter}")
    asked(Path(interpreter), f"import venv; venv.create({str(home)!r}, with_pip=True)", row.python)
    python = home / "bin/python"
    options = ("--quiet", "--quiet", "--no-input", "--no-compile", "--no-cache-dir")
    pip = [python, "-m", "pip", "install", *options, "--editable", ROOT, *TESTED_BY, *row.pins]
    subprocess.run(pip, cwd=home, capture_output=True, text=True, check=True)
    return python


def asked(python: Path, code: str, version: str = "") -> str:
    """What some code prints. pyenv's commands want to know which version is meant."""
    named = {"PYENV_VERSION": version} if version else {}
    argv = [python, "-c", code]
    return subprocess.run(argv, env=os.environ | named, capture_output=True, text=True, check=True).stdout


def counts(python: Path, home: Path, tests: tuple[str, ...]) -> str:
    """Run some tests and count how they ended."""
    report = home / "report.xml"
    ours = {name: value for name, value in os.environ.items() if name not in ("CI", "PYTHONPATH", "VIRTUAL_ENV")}
    ours |= {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    # What an old library warns of in itself is no failure of ours. A module that cannot be imported is one.
    options = ("-q", "-W", "default", "-p", "no:cacheprovider", "--continue-on-collection-errors")
    options += ("--junitxml", f"{report}")
    report.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="cg-") as short:  # the path of a socket has 107 bytes at most
        argv = [python, "-m", "pytest", *options, "--basetemp", f"{short}/files", *tests]
        done = subprocess.run(argv, cwd=ROOT, env=ours, check=False)
    if not report.exists():
        return f"failed: no test was run, pytest ended with {done.returncode}"
    [suite] = ElementTree.parse(report).getroot()
    total, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
    failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    parts = ((total - skipped - failed, "passed"), (skipped, "skipped"), (failed, "failed"))
    return ", ".join(f"{count} {word}" for count, word in parts if count)


def write(name: str, column: str, cell: str) -> None:
    """Put a cell into the page."""
    lines = PAGE.read_text(encoding="utf-8").splitlines(keepends=True)
    [columns] = [line.split("|") for line in lines if line.startswith("| row |")]
    [number] = [number for number, line in enumerate(lines) if line.startswith(f"| {name} |")]
    cells = lines[number].split("|")
    cells[columns.index(f" {column} ")] = f" {cell} "
    lines[number] = "|".join(cells)
    PAGE.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
