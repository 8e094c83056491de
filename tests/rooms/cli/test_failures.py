"""Failures: with --json, each prints exactly one document, and says the same on stderr."""

from __future__ import annotations

import json

import click
import pytest
from support.json_documents import ERROR, ordered, shape

from ckptguard import errors
from ckptguard.cli.entry import COMMANDS
from ckptguard.runs import find_known_good
from ckptguard.values.exit_codes import ExitCode, of_error

KINDS = sorted(
    (one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, errors.CkptguardError)),
    key=lambda kind: kind.__name__,
)
FIELDS = {
    errors.RefusedError: {"outcome": "bad"},
    errors.SickTrainingError: {"known_good": None},
    **{kind: {"key": "k"} for kind in KINDS if issubclass(kind, (errors.StorageError, errors.ChangedWhileReadError))},
}


@pytest.fixture
def failing(invoke, verified, monkeypatch):
    """Have `known-good` raise an error; returns the result and the one document on stdout."""

    def call(error):
        def broken(*args, **kwargs):
            raise error

        monkeypatch.setattr(find_known_good, "best_on_record", broken)
        result = invoke("known-good", verified, "--json")
        return result, json.loads(result.stdout)

    return call


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_of_ours_is_a_document(failing, kind):
    """Its kind, its sentence, its hint, and the exit code of the process."""
    error = kind("what\x1b is", hint="what to do", **FIELDS.get(kind, {}))
    result, found = failing(error)
    assert result.exit_code == of_error(error)
    assert ordered(shape(found)) == ordered(shape(ERROR))
    assert found["error"] == {
        "kind": kind.kind,
        "message": "what\x1b is",
        "hint": "what to do",
        "exit_code": result.exit_code,
    }
    assert result.stdout.isascii()
    assert "\x1b" not in result.stderr
    assert result.stderr.startswith("error: what")


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (ZeroDivisionError("oops"), "unexpected", ExitCode.FAILED),
        (MemoryError(), "could_not_tell", ExitCode.FAILED),
        (ImportError("no such library"), "could_not_tell", ExitCode.FAILED),
        (PermissionError(13, "Permission denied"), "could_not_tell", ExitCode.FAILED),
        (KeyboardInterrupt(), "interrupted", ExitCode.INTERRUPTED),
        (click.Abort(), "interrupted", ExitCode.INTERRUPTED),
        (click.UsageError("say it otherwise"), "usage", ExitCode.USAGE),
        (click.ClickException("not so"), "usage", ExitCode.USAGE),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_what_others_raise_is_a_document(failing, error, kind, code):
    """Mistakes of ours, a machine that lacks something, an interruption, wrong usage."""
    result, found = failing(error)
    assert (result.exit_code, found["error"]["exit_code"], found["error"]["kind"]) == (code, code, kind)
    assert found["command"] == "known-good"
    assert result.stderr
    assert ("please report it" in result.stderr) == (kind == "unexpected")


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"completion"}))
@pytest.mark.parametrize("words", [(), ("--no-such-option",), ("absent", "too", "many", "words", "--step=x")], ids=len)
def test_wrong_usage_of_any_command_is_a_document(invoke, root, name, words):
    """Also of `supervise`, which has no --json: that is the wrong usage. What needs no argument has its document."""
    result = invoke(name, *words, "--json")
    found = json.loads(result.stdout)
    assert found["command"] == name
    assert ("error" in found) == (result.exit_code != 0)
    if "error" in found:
        assert found["error"]["exit_code"] == result.exit_code


@pytest.mark.parametrize("words", [("stauts", "run"), ("--bogus",), ("--bogus", "list", "run"), ()])
def test_no_command_is_a_document_too(invoke, words):
    """A command line that names no command, or none that there is."""
    result = invoke(*words, "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["error"]["kind"] == "usage"


def test_the_options_of_a_supervised_command_are_its_own(process, root):
    """A --json behind `--` asks nothing of us."""
    done = process("supervise", root / "absent" / "run", "--max-rollbacks", "x", "--", "true", "--json")
    assert (done.returncode, done.stdout) == (2, "")


def test_only_one_document_is_printed(failing, invoke, verified, monkeypatch):
    """Trouble after the answer does not add a second one."""
    from ckptguard.cli.commands import known_good

    def both(*args, **kwargs):
        emit(*args, **kwargs)
        raise KeyboardInterrupt

    emit = known_good.emit
    monkeypatch.setattr(known_good, "emit", both)
    result = invoke("known-good", verified, "--json")
    assert result.exit_code == ExitCode.INTERRUPTED
    assert json.loads(result.stdout)["path"] == str(verified / "net-300.pt")


def test_without_json_stdout_stays_empty(invoke, root):
    """A script that reads a path gets none."""
    result = invoke("known-good", root / "absent")
    assert (result.exit_code, result.stdout) == (10, "")


@pytest.mark.parametrize(
    ("typed", "meant"), [("stauts", "status"), ("verfy", "verify"), ("knowngood", "known-good"), ("xyzzy", None)]
)
def test_a_mistyped_command_gets_a_suggestion(invoke, typed, meant):
    """What is near enough is named; what is near nothing is not guessed."""
    result = invoke(typed, "run")
    assert result.exit_code == 2
    assert f"there is no command {typed}" in result.stderr
    assert ("did you mean" in result.stderr) == (meant is not None)
    assert meant is None or f"did you mean {meant}?" in result.stderr
