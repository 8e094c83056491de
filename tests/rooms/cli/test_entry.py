"""The front door: quick to open, and nothing falls through it."""

import os
import shutil
import subprocess
import sys

import pytest
from support.runs import write_torch

from ckptguard.cli.entry import COMMANDS


def test_help_imports_no_heavy_module(process):
    """--help needs click alone: no numpy, rich, fsspec, torch or msgspec."""
    code = (
        "import sys; sys.argv = ['ckptguard', '--help']\n"
        "from ckptguard.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'numpy', 'rich', 'fsspec', 'torch', 'msgspec', 'blake3', 'asyncio'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=250)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(name in done.stdout for name in COMMANDS)


def test_known_good_is_answered_from_the_records_alone(verified):
    """Of a local run it takes click, msgspec and 53 modules of ours, none of which reads a checkpoint."""
    code = (
        f"import sys; sys.argv = ['ckptguard', 'known-good', {str(verified)!r}]\n"
        "from ckptguard.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "ours = [name for name in sys.modules if name.startswith('ckptguard.')]\n"
        "readers = {'formats', 'layouts', 'scan', 'checks', 'verification', 'replicas'}\n"
        "rooms = {name.split('.')[1] for name in ours} & readers\n"
        "heavy = {'numpy', 'rich', 'fsspec', 'torch', 'blake3', 'asyncio'} & set(sys.modules)\n"
        "sys.exit(str((len(ours), rooms, heavy)) if len(ours) > 53 or rooms or heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == str(verified / "net-300.pt")


def test_a_current_folder_that_is_gone_is_a_sentence(process, root, monkeypatch):
    """A shell may stand in a folder that somebody removed."""
    gone = root / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    command = f"rmdir {gone} && {sys.executable} -m ckptguard list ."
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=250, check=False)
    assert (done.returncode, done.stdout) == (10, "")
    assert done.stderr.startswith("error: the current folder no longer exists")


def test_settings_without_an_end_are_refused(process, three):
    """What --config names is read up to a bound."""
    done = process("verify", three, "--config", "/dev/zero")
    assert (done.returncode, done.stdout) == (2, "")
    assert "too large" in done.stderr


def test_a_file_is_no_run(invoke, three):
    """What needs a run says so of a file."""
    result = invoke("list", three / "net-100.pt")
    assert result.exit_code == 10
    assert "is not a folder" in result.stderr


def test_a_debugger_gets_the_traceback(process, root):
    """CKPTGUARD_DEBUG=1 shows where an error came from, and nothing else does."""
    assert "Traceback" not in process("known-good", root).stderr
    assert "Traceback" in process("known-good", root, CKPTGUARD_DEBUG="1").stderr


@pytest.mark.skipif(os.name == "nt", reason="needs a POSIX pipe")
def test_a_closed_pipe_does_not_hide_the_verdict(three, flip):
    """A reader that goes away early leaves no noise, and the exit code still tells what was found."""
    reader, writer = os.pipe()
    os.close(reader)
    (three / "net-200.pt").write_bytes(b"not a checkpoint")
    with os.fdopen(writer, "w") as stdout:
        done = subprocess.run(
            [sys.executable, "-m", "ckptguard", "verify", three],
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=250,
        )
    assert (done.returncode, done.stderr) == (3, "")


def test_settings_come_from_flag_then_environment_then_file(invoke, root, tmp_path, monkeypatch):
    """A flag beats the environment, which beats ./ckptguard.toml."""
    write_torch(root, 100, seed=1)
    (tmp_path / "ckptguard.toml").write_text('records = "from-file"\n')
    invoke("verify", root)
    assert (tmp_path / "from-file" / "format.json").is_file()
    monkeypatch.setenv("CKPTGUARD_RECORDS", str(tmp_path / "from-environment"))
    invoke("verify", root)
    assert (tmp_path / "from-environment" / "format.json").is_file()
    invoke("verify", root, "--records", tmp_path / "from-flag")
    assert (tmp_path / "from-flag" / "format.json").is_file()
    assert not (root / "_ckptguard").exists()


@pytest.mark.parametrize("text", ["settle = 'soon'", "no toml", "unheard_of = 1", "keep_good = 0", None])
def test_nonsense_settings_are_refused_with_a_sentence(invoke, three, tmp_path, text):
    """A settings file that cannot be true, or is not there, ends with 2, before anything is read."""
    if text is not None:
        (tmp_path / "bad.toml").write_text(text)
    result = invoke("list", three, "--config", tmp_path / "bad.toml")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_name_the_command(invoke, shell):
    """Each shell gets a script that completes `ckptguard`."""
    result = invoke("completion", shell)
    assert result.exit_code == 0
    assert "ckptguard" in result.stdout
    assert "_CKPTGUARD_COMPLETE" in result.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize("program", ["ckptguard", "ckptguard-daemon"])
def test_each_program_answers_the_script_of_each_shell(invoke, shell, program):
    """The script that is printed asks the program by a variable, and the program answers with its options."""
    script = invoke("completion", shell).stdout
    variable = f"_{program.upper().replace('-', '_')}_COMPLETE"
    assert f"{variable}={shell}_complete" in script
    words = {"bash": ("--li", "1"), "zsh": ("--li", "1"), "fish": ("--li", "--li")}[shell]
    typed = {"COMP_WORDS": f"{program} {words[0]}", "COMP_CWORD": words[1], variable: f"{shell}_complete"}
    if program == "ckptguard":
        typed |= {"COMP_WORDS": "ckptguard prune --dry", "COMP_CWORD": "--dry" if shell == "fish" else "2"}
    module = {"ckptguard": "ckptguard.cli", "ckptguard-daemon": "ckptguard_daemon.__main__"}[program]
    command = [sys.executable, "-c", f"import sys; sys.argv = [{program!r}]; from {module} import main; main()"]
    done = subprocess.run(command, env=os.environ | typed, capture_output=True, text=True, check=False, timeout=200)
    expected = ["--dry-run"] if program == "ckptguard" else ["--limit", "--link"]
    assert [option for option in expected if option in done.stdout] == expected, (done.stdout, done.stderr)
    assert "--tokens" not in done.stdout


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_a_shell_reads_the_script(invoke, tmp_path):
    """bash has a completion for both programs after it."""
    (tmp_path / "script").write_text(invoke("completion", "bash").stdout)
    told = subprocess.run(
        ["bash", "-c", f"source {tmp_path}/script; complete -p ckptguard ckptguard-daemon"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert [line.split()[-1] for line in told] == ["ckptguard", "ckptguard-daemon"]


def test_completion_offers_commands(process):
    """What the script asks for comes back: the commands that begin with the typed letters."""
    asked = {"_CKPTGUARD_COMPLETE": "bash_complete", "COMP_WORDS": "ckptguard re", "COMP_CWORD": "1"}
    offered = {line.partition(",")[2] for line in process(**asked).stdout.split()}
    assert offered == {"restore", "reseal", "replicate", "repair"}
