"""What commands load before they do anything: start-up is most of what verifying a small file takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from ckptguard.values.settings import Settings
from ckptguard.verification.target import verify_target

PROGRAM = """
import json, sys
from ckptguard.cli import main
try:
    main()
except SystemExit as ended:
    assert ended.code == 0, ended.code
print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""
HEADER = b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
BEYOND_PYTHON = {"ckptguard", "click", "msgspec", "blake3", "isal", "numpy", "typing_extensions"}
# What those bring, and what an environment runs in every process.
NOT_OURS = {"_distutils_hack", "sitecustomize", "usercustomize", "__editable__", "cython_runtime", "_cython_3_1_2"}
# Standard modules that take milliseconds and that none of these commands has a use for on a local disk.
HEAVY = {"asyncio", "concurrent.futures", "http.client", "multiprocessing", "ssl", "subprocess", "tempfile", "tomllib"}


def loaded(*argv: str) -> set[str]:
    """The modules that a command has loaded when it ends."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, *argv], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stderr.splitlines()[-1]))


def ours(modules: set[str]) -> list[str]:
    """Those of our own package."""
    return sorted(name for name in modules if name.split(".")[0] == "ckptguard")


def third_party(modules: set[str]) -> set[str]:
    """The top-level packages that are neither Python's nor a part of every process."""
    tops = {name.split(".")[0] for name in modules if not name.startswith("__")}
    return {top for top in tops - sys.stdlib_module_names - NOT_OURS if not top.startswith("_") and top != "org"}


def small_file(path: Path) -> Path:
    """A whole file of four numbers, old enough to count as quiet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(HEADER).to_bytes(8, "little") + HEADER + bytes(range(60, 76)))
    os.utime(path, (time.time() - 60, time.time() - 60))
    return path


def test_version_loads_the_command_line_alone() -> None:
    """Neither a command nor what it works on."""
    modules = loaded("--version")
    assert third_party(modules) <= {"ckptguard", "click"}
    assert len(ours(modules)) <= 12, ours(modules)


def test_verifying_a_small_local_file_is_light(tmp_path: Path) -> None:
    """Nothing of remote storages, of other formats and layouts, of terminals, or of threads that it does not start."""
    modules = loaded("verify", str(small_file(tmp_path / "model.safetensors")))
    assert third_party(modules) <= BEYOND_PYTHON
    assert modules & HEAVY == set()
    assert len(ours(modules)) <= 136, ours(modules)
    for part in ("formats.torch", "formats.pickle", "formats.numpy", "storage.remote", "scan.process", "layouts.dcp"):
        assert f"ckptguard.{part}" not in modules, part


def test_known_good_reads_no_bytes_and_so_loads_no_numpy(tmp_path: Path) -> None:
    """Names, one verdict, one manifest: no reader of any format, nothing that hashes a file, no layout but the one."""
    small_file(tmp_path / "step-1" / "model.safetensors")
    verify_target(str(tmp_path), Settings(settle=0.0))
    modules = loaded("known-good", str(tmp_path))
    assert third_party(modules) <= BEYOND_PYTHON - {"numpy", "isal"}
    assert "ckptguard.formats.safetensors" not in modules
    assert len(ours(modules)) <= 136, ours(modules)
