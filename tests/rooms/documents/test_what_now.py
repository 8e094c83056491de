"""Each finding says what to do now, and that suits the place: a download, a run with a good checkpoint, one without."""

from __future__ import annotations

import re
import shlex
from fnmatch import fnmatchcase
from pathlib import Path

import click
import msgspec
import pytest

import ckptguard
from ckptguard.checks.schema import QUESTION, UNCLEAR_SAVE
from ckptguard.cli.entry import COMMANDS, Commands
from ckptguard.documents import report_lines
from ckptguard.documents.report_lines import ANSWERS, command, what_now
from ckptguard.runs.results import Checked, VerifyReport
from ckptguard.values.ids import CheckpointId, escape
from ckptguard.values.verdict import PLUGIN, UNDERSTOOD, Finding, Outcome, Severity

PLACES = ("download", "run", "run without a good one")
IN_RUNS = {QUESTION, UNCLEAR_SAVE, "incident"}  # a doubt by what is on record
COMMAND = Commands("ckptguard")
GO_BACK = {"structure", "completeness", "same-save", "zeros", "digests", "finite", "stale", "drift", "schema"}


def report(place: str, *findings: Finding, step: int = 70) -> VerifyReport:
    """What verification says of one checkpoint at a place."""
    in_run = place != "download"
    checked = Checked(
        path=f"step-{step}.pt",
        series="step-#.pt",
        layout="file",
        step=step,
        id=CheckpointId("step-#.pt", step, 1) if in_run else None,
        outcome=Outcome.BAD,
        digest_origin=None,
        bytes=1,
        seconds=None,
        findings=findings,
    )
    return VerifyReport(
        target="/r",
        kind="run" if in_run else "file",
        checkpoints=(checked,),
        run="/r" if in_run else None,
        known_good=("step-60.pt", CheckpointId("step-#.pt", 60, 1)) if place == "run" else None,
    )


def test_the_table_has_every_check() -> None:
    """Every name that the source gives a finding."""
    text = "".join(path.read_text() for path in Path(ckptguard.__file__).parent.rglob("*.py"))
    named = set(re.findall(r"Finding(?:\(|,)\s*\"([a-z-]+)\"", text)) | {QUESTION, UNCLEAR_SAVE, UNDERSTOOD, PLUGIN}
    assert len(named) > 12
    assert named <= set(ANSWERS)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("severity", [Severity.ERROR, Severity.SICKNESS, Severity.WARNING])
@pytest.mark.parametrize("check", [*ANSWERS, f"{PLUGIN}:a rule"])
def test_what_weighs_says_what_to_do(check: str, severity: Severity, place: str) -> None:
    """With commands that exist; a download is no run, and without a good checkpoint nobody is sent back to one."""
    if place == "download" and severity is not (Severity.ERROR if check == QUESTION else None) and check in IN_RUNS:
        pytest.skip("a download has no records")
    found = Finding(check, severity, "m", "step-70.pt", found="posix.system" if check == "pickle-safety" else None)
    if check == "pickle-safety" and severity is not Severity.ERROR:
        found = Finding(check, severity, "m", "step-70.pt", found="a.B", count=1)
    said = what_now(report(place, found))
    assert said
    assert "{}" not in "".join(said)
    commands = re.findall(r"ckptguard ([a-z-]+)", "".join(said))
    assert set(commands) <= set(COMMANDS)
    if place == "download":
        assert not {"rollback", "repair", "clear", "accept", "reseal", "list", "incident"}.intersection(commands)
    else:
        assert not any("download" in one for one in said)
    if place == "run without a good one":
        assert "rollback" not in commands
    if place == "run" and severity is Severity.ERROR and check in GO_BACK | {"pickle-safety"}:
        assert "go back to step-60.pt: ckptguard rollback /r" in " ".join(said)


@pytest.mark.parametrize("check", sorted(GO_BACK))
def test_what_is_older_than_the_known_good_needs_no_going_back(check: str) -> None:
    """A resume takes the newer one."""
    said = what_now(report("run", Finding(check, Severity.ERROR, "m", "step-50.pt"), step=50))
    assert "resume from step-60.pt, which is newer and good" in said[0]
    assert "rollback" not in "".join(said)


@pytest.mark.parametrize("check", sorted(GO_BACK))
def test_one_model_of_many_is_not_replaced_by_another(check: str) -> None:
    """Models in one folder look like saves under fixed names: what a rollback does is said with its condition."""
    found = report("run", Finding(check, Severity.ERROR, "m", "nan/model.safetensors"))
    one = msgspec.structs.replace(found.checkpoints[0], path="nan", series="nan", step=None)
    said = what_now(
        msgspec.structs.replace(found, checkpoints=(one,), known_good=("plain", CheckpointId("plain", None, 1)))
    )
    assert [sentence for sentence in said if "rollback" in sentence] == [
        "if one training saved model.safetensors and plain, go back to that: ckptguard rollback /r; "
        "else download it again"
    ]


@pytest.mark.parametrize("count", [1, 2, 20])
def test_every_hostile_file_is_named(count: int) -> None:
    """Once, to be deleted, and nothing else is said of it."""
    names = [f"{number}.pt" for number in range(count)]
    findings = [Finding("structure", Severity.SICKNESS, "it calls x", name) for name in names]
    findings += [Finding("pickle-safety", Severity.ERROR, "m", name, found="posix.system") for name in names]
    (said,) = what_now(report("download", *findings))
    assert said.startswith("delete ")
    assert said.endswith(": loading runs code")
    assert set(re.findall(r"[0-9]+\.pt", said)) == set(names)


@pytest.mark.parametrize("kind", ["run", "checkpoint"])
@pytest.mark.parametrize("check", ANSWERS)
def test_each_command_can_be_given_as_it_is(check: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes what it is given, and names the run and the checkpoint, also where only that was verified."""
    given: list[tuple[str, ...]] = []

    def noted(*words: str) -> str:
        given.append(words)
        return command(*words)

    monkeypatch.setattr(report_lines, "command", noted)
    target = "/r" if kind == "run" else "/r/step-70.pt"
    for severity in Severity:
        found = report("run", Finding(check, severity, "m", "step-70.pt"))
        list(what_now(msgspec.structs.replace(found, kind=kind, target=target)))
    for verb, *places in given:
        options = ["--reason", "x"] if verb == "clear" else []
        COMMAND.get_command(click.Context(COMMAND), verb).make_context(verb, [*places, *options])
        if verb in ("clear", "accept"):
            assert places == ["/r", "step-70.pt"]
        elif verb in ("reseal", "show", "verify"):
            assert places == ["/r/step-70.pt"]
        else:
            assert places == ["/r"]


HOSTILE = ("{}", "a'; touch pwned; '.pt", "$(touch pwned)", "`touch pwned`.pt", "a b; c", "\0\n\x1b[2J")


@pytest.mark.parametrize("file", HOSTILE)
@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("place", PLACES)
def test_no_name_reaches_a_shell(name: str, file: str, place: str) -> None:
    """Whatever a tensor, a class, a file or the folder is called: what is to be pasted is one word each."""
    there = report(
        place,
        Finding("finite", Severity.ERROR, "m", file, tensor=name, count=1),
        step=70,
    )
    unsafe = report(place, Finding("pickle-safety", Severity.ERROR, "m", file, found=name, count=1))
    for one, option in ((there, "--allow-nonfinite "), (unsafe, "--trust-global ")):
        said = what_now(msgspec.structs.replace(one, target=f"/{name}"))
        (line,) = (sentence for sentence in said if option in sentence)
        pasted = line.split(option)[1].removesuffix(" (or a pattern for several)")
        (word,) = shlex.split(pasted)
        assert fnmatchcase(escape(name), word)


@pytest.mark.parametrize("name", ["*", "*.*", "[!x]", "a?", "torch.*"])
def test_a_name_is_no_pattern(name: str) -> None:
    """A file chooses its names: to allow one must not allow others."""
    found = (
        Finding("finite", Severity.ERROR, "m", "x.pt", tensor=name, count=1),
        Finding("pickle-safety", Severity.ERROR, "m", "x.pt", found=name, count=1),
    )
    for one in found:
        (line,) = (sentence for sentence in what_now(report("download", one)) if "--" in sentence)
        word = shlex.split(line.removesuffix(" (or a pattern for several)"))[-1]
        assert fnmatchcase(name, word)
        assert not any(fnmatchcase(other, word) for other in ("x", "os.system", "ab", "torch.nn", ""))


def test_a_hostile_file_earns_no_trust() -> None:
    """What else it names is not to be trusted."""
    found = Finding("pickle-safety", Severity.ERROR, "m", "x.pt", found="posix.system")
    other = Finding("pickle-safety", Severity.ERROR, "m", "x.pt", found="my.Class", count=1)
    assert what_now(report("download", found, other)) == ["delete x.pt: loading runs code"]


@pytest.mark.parametrize("check", sorted(GO_BACK))
@pytest.mark.parametrize("sure", [True, False])
def test_nothing_is_given_up_that_may_be_good(check: str, *, sure: bool) -> None:
    """Only where all of a run was judged is it said that nothing is good, and even then what is left is named."""
    found = report("run without a good one", Finding(check, Severity.ERROR, "m", "step-70.pt"))
    said = " ".join(what_now(msgspec.structs.replace(found, none_is_good=sure)))
    assert ("nothing is good" in said) is sure
    assert ("ckptguard known-good /r" if sure else "ckptguard verify /r") in said
    assert ("scratch" in said) is sure
