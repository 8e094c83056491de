"""The set-up script: what can be said of it without installing anything."""

import ast
import importlib.util
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = (ROOT / "dev.py").read_text(encoding="utf-8")


@pytest.fixture
def dev():
    """The script as a module; importing it does nothing."""
    spec = importlib.util.spec_from_file_location("dev", ROOT / "dev.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_old_python_can_read_it():
    """It keeps to the syntax of old Pythons, so that they say what is needed instead of SyntaxError."""
    ast.parse(SOURCE, feature_version=(3, 6))


def test_it_needs_the_standard_library_alone():
    """Nothing has to be installed before it."""
    tree = ast.parse(SOURCE)
    names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert {n.split(".")[0] for n in names} <= set(sys.stdlib_module_names)


def test_a_launchers_variables_are_dropped(dev, monkeypatch):
    """torch must not believe that the tests are one rank of many, and the venv's scripts come first."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH"):
        monkeypatch.setenv(name, "7")
    environment = dev.environment()
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH"} & set(environment)
    assert environment["PATH"].split(os.pathsep)[0] == str(dev.BIN)


def test_the_set_up_is_done_once(dev, monkeypatch, tmp_path):
    """Where the stamp fits nothing is called; where the requirements changed, pip is, and the venv stays."""
    calls = []
    monkeypatch.setattr(dev, "STAMP", tmp_path / "stamp")
    monkeypatch.setattr(dev, "PYTHON", Path(sys.executable))
    monkeypatch.setattr(dev, "create", lambda theirs: calls.append("create"))
    monkeypatch.setattr(dev, "install", lambda what, *requirements: calls.append(requirements[-1]))
    monkeypatch.setattr(dev, "torch_folder", lambda python: None)
    dev.set_up()
    assert calls == ["create", dev.TORCH, ".[test]"]
    calls.clear()
    dev.set_up()
    assert calls == []
    dev.set_up("writers")
    assert calls == [dev.TORCH, ".[test,writers]"]
    calls.clear()
    dev.set_up()
    dev.set_up("writers")
    assert calls == []
    lines = dev.STAMP.read_text().splitlines()
    dev.STAMP.write_text(f"{lines[0]}\nother requirements\n")
    dev.set_up()
    assert calls == [dev.TORCH, ".[test]"]


def test_the_site_is_built_by_one_command(dev, monkeypatch, tmp_path):
    """It is built strictly, by its builder alone. What the documents repeat of the code is written first only where
    that is asked for, and that alone needs our package."""
    calls = []
    monkeypatch.setattr(dev, "ROOT", tmp_path)
    monkeypatch.setattr(dev, "SITE", tmp_path / ".venv" / "site")
    (tmp_path / "pyproject.toml").write_text('[project.optional-dependencies]\ndocs = ["builder>=1"]\n')
    monkeypatch.setattr(dev, "set_up", lambda *extras: calls.append(extras))
    monkeypatch.setattr(dev, "install", lambda what, *requirements, python: calls.append(requirements))
    monkeypatch.setattr(dev.venv.EnvBuilder, "create", lambda builder, folder: folder.mkdir(parents=True))
    monkeypatch.setattr(dev, "run", lambda *command: calls.append(command[1:]) or 0)
    build = ("-m", "zensical", "build", "--strict", "--clean")
    assert dev.docs([]) == 0
    assert calls == [("builder>=1",), build]
    assert dev.docs(["--refresh"]) == 0
    assert calls[2:] == [(), ("tests/docs/refresh.py",), build]


def test_servers_are_installed_while_pip_works(dev, monkeypatch, tmp_path):
    """Once there is a venv, for making one would take them away; also where nothing else is left to do."""
    calls, servers = [], threading.Event()
    monkeypatch.setattr(dev, "STAMP", tmp_path / "stamp")
    monkeypatch.setattr(dev, "PYTHON", Path(sys.executable))
    monkeypatch.setattr(dev, "create", lambda theirs: calls.append("create"))
    monkeypatch.setattr(dev, "torch_folder", lambda python: "/somewhere")
    monkeypatch.setattr(dev, "install_servers", lambda: (calls.append("servers"), servers.set()))
    monkeypatch.setattr(dev, "install", lambda *_: (servers.wait(100), calls.append("pip")))
    dev.set_up_for_tests()
    dev.set_up_for_tests()
    assert calls == ["create", "servers", "pip", "servers"]


def test_an_importable_torch_is_used(dev, monkeypatch, tmp_path):
    """Where torch is there already, only the package is installed."""
    calls = []
    monkeypatch.setattr(dev, "STAMP", tmp_path / "stamp")
    monkeypatch.setattr(dev, "create", lambda theirs: calls.append(theirs))
    monkeypatch.setattr(dev, "install", lambda what, *requirements: calls.append(requirements[-1]))
    monkeypatch.setattr(dev, "torch_folder", lambda python: "/somewhere")
    dev.set_up()
    assert calls == ["/somewhere", ".[test]"]


@pytest.mark.parametrize(("argument", "code"), [("--help", 0), ("tset", 2)])
def test_usage(argument, code):
    """--help explains; what is not known is explained too, and is an error."""
    done = subprocess.run(
        [sys.executable, ROOT / "dev.py", argument], capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == code
    assert "python dev.py test" in done.stdout


def test_servers_are_installed_only_where_that_is_ours_to_do(dev, monkeypatch, tmp_path):
    """As root or in CI, once, and a failure is told and stops nothing."""
    calls = []
    monkeypatch.setattr(dev, "AZURITE", tmp_path / "azurite")
    monkeypatch.setattr(dev, "quietly", lambda *command: calls.append(command))
    monkeypatch.setattr(dev.shutil, "which", lambda name, path=None: name if name in ("apt-get", "npm") else None)
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    dev.install_servers()
    assert [command[0] for command in calls] == ["npm"]
    (tmp_path / "azurite" / "node_modules" / "azurite").mkdir(parents=True)
    monkeypatch.setenv("CI", "true")
    dev.install_servers()
    assert [command[:2] for command in calls[1:]] == [("sudo", "-n")] * 2
    assert {"radosgw", "openssh-server"} <= set(calls[-1])
    monkeypatch.setattr(dev.shutil, "which", lambda name, path=None: name)
    calls.clear()
    dev.install_servers()
    assert calls == []


def test_a_command_that_fails_is_told(dev, capfd):
    """With what it said, and without an exception."""
    dev.quietly(sys.executable, "-c", "import sys; print('fine')")
    dev.quietly(sys.executable, "-c", "import sys; sys.exit('no such package')")
    printed = capfd.readouterr().out
    assert "no such package" in printed
    assert "fine" not in printed


def test_the_tests_files_lie_in_memory_where_there_is_room(dev, monkeypatch, tmp_path):
    """And are deleted; where there is too little of it, or no such place, they lie where pytest puts them."""
    monkeypatch.setattr(dev, "MEMORY", tmp_path)
    monkeypatch.setattr(dev, "MEMORY_NEEDED", 0)
    with dev.in_memory() as (option, folder):
        assert option == "--basetemp"
        assert Path(folder).parent == tmp_path
        Path(folder, "file").touch()
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(dev, "MEMORY_NEEDED", 1 << 60)
    with dev.in_memory() as options:
        assert options == ()
    monkeypatch.setattr(dev, "MEMORY", tmp_path / "absent")
    with dev.in_memory() as options:
        assert options == ()


def test_a_linked_environment_is_never_emptied(dev, tmp_path, monkeypatch):
    """It is that of another checkout."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "kept").touch()
    (tmp_path / "linked").symlink_to(theirs)
    monkeypatch.setattr(dev, "HOME", tmp_path / "linked")
    with pytest.raises(SystemExit, match="is a link"):
        dev.create(None)
    assert (theirs / "kept").exists()
