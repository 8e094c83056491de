"""Where output goes: data to stdout, trouble to stderr, bars and tables to terminals only."""

import itertools
import json
import os
import re
import subprocess
import sys

import pytest
from support.commands import on_a_terminal

from ckptguard.cli.render import age, size, some
from ckptguard.terminal.output import bytes_below, progress_bar


def test_a_bar_goes_to_the_terminal_and_data_to_the_pipe(three):
    """With stderr on a terminal a bar is drawn there, and stdout is still one clean document."""
    code, piped, shown = on_a_terminal(["verify", three, "--json"], stdout=False)
    assert code == 0
    assert json.loads(piped)["outcome"] == "good"
    assert "verifying" in shown


def test_a_sentence_has_its_own_line_beside_a_bar(verified, tmp_path):
    """What restore says while its bar is drawn is not written into the bar."""
    code, piped, shown = on_a_terminal(["restore", verified, "--to", tmp_path / "o"], stdout=False, columns=400)
    assert (code, piped) == (0, f"{tmp_path}/o/net-300.pt\n")
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    lines = [line for part in plain.splitlines() for line in part.split("\r")]
    assert any(re.fullmatch(rf"restoring net-300\.pt of .* as {tmp_path}/o/net-300\.pt", line) for line in lines)


def test_a_notebook_gets_no_bar(three, monkeypatch):
    """What a notebook runs by `!` sees a terminal, and its reader would see every redraw of a bar."""
    monkeypatch.setenv("JPY_PARENT_PID", "1")
    code, _, shown = on_a_terminal(["verify", three, "--json"], stdout=False)
    assert (code, shown) == (0, "")


def test_a_terminal_gets_a_table(verified):
    """On a terminal the listing has colours; nothing is lost at 80 columns."""
    code, _, shown = on_a_terminal(["list", verified], stdout=True)
    assert code == 0
    assert "\x1b[" in shown
    assert all(f"net-{step}.pt" in shown for step in (100, 200, 300))


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("variables", [*itertools.product(("", "1"), ("", "1"), ("xterm", "dumb"))])
def test_colours_are_where_the_environment_wants_them(process, verified, terminal, variables):
    """As no-color.org has it: NO_COLOR before FORCE_COLOR before a dumb terminal before what the output is."""
    never, always, kind = variables
    given = {"NO_COLOR": never, "FORCE_COLOR": always, "TERM": kind}
    if terminal:
        shown = on_a_terminal(["list", verified], stdout=True, **given)[2]
    else:
        shown = process("list", verified, **given).stdout
    wanted = not never and (bool(always) or (terminal and kind != "dumb"))
    assert ("\x1b[" in shown) is wanted
    assert "net-300.pt" in shown


@pytest.mark.parametrize(
    ("variables", "coloured", "drawn"), [({}, 1, 1), ({"NO_COLOR": "1"}, 0, 1), ({"TERM": "dumb"}, 0, 0)]
)
def test_a_bar_has_colours_where_tables_have_them(three, variables, coloured, drawn):
    """With NO_COLOR it is drawn without, and a dumb terminal gets nothing that it cannot show."""
    shown = on_a_terminal(["verify", three, "--json"], stdout=False, **{"TERM": "xterm-256color", **variables})[2]
    numbers = [int(n) for found in re.findall(r"\x1b\[([0-9;]*)m", shown) for n in found.split(";") if n]
    assert any(30 <= number <= 49 or number >= 90 for number in numbers) is bool(coloured)
    assert ("\x1b" in shown) is bool(drawn)


def test_a_pipe_gets_plain_lines(process, verified):
    """Without a terminal there are no colours, no bars, no box drawing, and short names fit in 80 columns."""
    for name in ("list", "status", "verify"):
        done = process(name, verified, CKPTGUARD_SETTLE="0")
        assert done.stderr == ""
        assert done.stdout.isascii()
        assert "\x1b" not in done.stdout
    assert all(len(line) <= 80 for line in process("list", verified).stdout.splitlines())


def test_no_bar_without_a_terminal(capsys):
    """Nobody is watching: nothing is counted and nothing is drawn."""
    with progress_bar("reading", 10) as advance:
        assert advance is None
    assert bytes_below("/") is None
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["verify", "list", "status", "known-good", "show", "rollback", "reseal"])
def test_an_empty_argument_is_refused(invoke, name):
    """An empty path is an unset variable in a script, and never means the current folder."""
    assert invoke(name, "").exit_code == 2


def test_a_reason_is_one(invoke, verified):
    """What lifts a suspicion is recorded with a reason, and not with an empty text."""
    assert invoke("clear", verified, "100", "--reason", " ").exit_code == 2


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("list", "RUN"), 1, "error: the output cannot be written"),
        (("--help",), 1, "error: the output cannot be written"),
        (("--version",), 1, "error: the output cannot be written"),
        (("list", "RUN/absent", "--json"), 10, "error: there is no folder"),  # that is the error
    ],
)
def test_an_output_that_cannot_be_written_is_a_sentence(three, words, code, said):
    """On a full disk, also before any command runs."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "ckptguard", *(word.replace("RUN", str(three)) for word in words)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=250,
            check=False,
        )
    assert done.returncode == code
    assert done.stderr.startswith(said)
    assert "Traceback" not in done.stderr
    assert "mistake in ckptguard" not in done.stderr


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_change_no_answer(three, flip, closed):
    """As under some schedulers: the exit code still tells, and no file of ours takes a stream's number."""
    command = f"{sys.executable} -m ckptguard verify {three} {closed}"
    for code in (0, 3):
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=250, check=False)
        assert (done.returncode, done.stderr) == (code, "")
        flip(three / "net-200.pt")


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        *((size(count), text) for count, text in ((None, "-"), (0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"))),
        (size(3 * 1024**4), "3.0 TiB"),
        *((age(span), text) for span, text in ((None, "-"), (5, "5 seconds"), (300, "5 minutes"), (1e6, "12 days"))),
        (some(["a", "b"]), "a, b"),
        (some([str(n) for n in range(12)]), "0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more"),
    ],
)
def test_numbers_and_many_names_read_well(shown, text):
    """In the unit that people use. A run of a thousand pending saves does not fill the screen."""
    assert shown == text


def test_a_narrow_terminal_folds_no_names(verified):
    """Where columns do not fit each cell has its own line, in the same colour, and names stay whole."""
    _, _, shown = on_a_terminal(["list", verified], stdout=True, columns=40)
    assert "\x1b[32mgood" in shown
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines()
    assert all(len(line) <= 40 for line in lines)
    assert [line for line in lines if line.startswith("net-")] == [f"net-{s}.pt" for s in (100, 200, 300)]
    assert [lines.count(line) for line in ("  OUTCOME: good", "  WHERE: run")] == [3, 3]


@pytest.mark.parametrize("words", [("bisect", "."), ("diff", "net-100.pt", "net-400.pt"), ("doctor", ".")])
def test_no_line_is_wider_than_the_terminal(verified, monkeypatch, words):
    """Whatever a command says: sentences and stages fold like tables."""
    (verified / "net-400.pt").write_bytes((verified / "net-300.pt").read_bytes()[:-3000])
    monkeypatch.chdir(verified)
    _, _, shown = on_a_terminal(words, stdout=True, columns=38)
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in re.split(r"[\r\n]+", shown)]
    told = [line for line in lines if not line.startswith(("warning: ", "error: ", "hint: "))]
    assert [line for line in told if len(line) > 38] == []
    assert len(told) > 3
