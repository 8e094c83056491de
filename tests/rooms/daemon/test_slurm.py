"""The files for Slurm, in a real Slurm: its jobs' saves are verified when they end, and its node stays in use."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from ckptguard_daemon.__main__ import command
from click.testing import CliRunner
from servers.slurm import Slurm
from support.daemon_process import save

from ckptguard.errors import NoKnownGoodError
from ckptguard.records.run import open_run
from ckptguard.runs.find_known_good import find_known_good

_SETTINGS = "settle = 0.1\n"


def example(name: str, **lines: object) -> str:
    """A printed file, with these of its lines edited."""
    text = CliRunner().invoke(command, ["--example", name]).output
    for key, value in lines.items():
        text, times = re.subn(rf"(?m)^{key}=.*$", f"{key}={value}", text)
        assert times == 1, key
    return text


@pytest.fixture
def cluster(slurm: Slurm) -> Iterator[Slurm]:
    """The cluster with our epilog, and without a prolog."""
    slurm.install("epilog", example("slurm-epilog", BIN=slurm.bin, LOG=slurm.folder / "epilog.log"))
    yield slurm
    slurm.install("prolog", "#!/bin/sh\nexit 0\n")
    if "DRAIN" in slurm.node():
        slurm.resume()
    print((slurm.folder / "epilog.log").read_text())  # shown when the test failed


def saves(place: Path, *steps: int, **options: int) -> Path:
    """Saves that a job will move into its run."""
    made = place / "made"
    made.mkdir()
    for step in steps:
        save(made, step, **options)
    for path in made.rglob("*"):
        path.chmod(0o644)
    return made


def training(place: Path) -> tuple[str, Path]:
    """A job's script that saves two checkpoints, and its run."""
    run, made = place / "run", saves(place, 100, 200)
    (place / "ckptguard.toml").write_text(_SETTINGS)
    return f"#!/bin/sh\nmkdir {run}\ncp -p {made}/net-*.safetensors {run}/\n", run


def known_good(run: Path) -> str:
    """The step that is known to be good, or nothing."""
    try:
        return str(find_known_good(open_run(str(run))).id)
    except NoKnownGoodError:
        return ""


def test_the_epilog_verifies_what_a_job_saved(cluster: Slurm) -> None:
    """Its saves have verdicts when the job has ended. Records and copies belong to the job's user, and so the epilog
    did not use its own rights for them."""
    place = cluster.place("verified")
    script, run = training(place)
    job = cluster.submit(place, script, f"--comment=ckptguard={run} something else")
    assert cluster.until_ended(job) == "IDLE"
    assert cluster.state_of(job) == "COMPLETED"
    assert known_good(run) == "200.1"
    assert {path.stat().st_uid for path in (run / "_ckptguard").rglob("*")} == {cluster.uid}


def test_a_job_that_names_no_run_costs_nothing(cluster: Slurm) -> None:
    """Nothing is read, nothing is written."""
    place = cluster.place("unnamed")
    script, run = training(place)
    assert cluster.until_ended(cluster.submit(place, script, "--comment=ckptguard= ckptguardian=/")) == "IDLE"
    assert not (run / "_ckptguard").exists()


def test_the_job_script_trains_from_what_is_good(cluster: Slurm) -> None:
    """The printed script with a run and a training of the test's: the first job begins, the second starts behind the
    gate, with what the first one saved."""
    place = cluster.place("script")
    run, made = place / "run", saves(place, 100)
    (place / "ckptguard.toml").write_text(_SETTINGS)
    training = f"sh -c 'ls {run} >> {place}/seen; cp -pn {made}/* {run}/'"
    text = example("slurm-job", BIN=cluster.bin, RUN=run).replace("/scratch/me/runs/exp1", str(run))
    command_line = 'srun python train.py --output_dir "$RUN"'
    assert text.count(command_line) == 1
    for seen in ("", "net-100.safetensors\n"):
        job = cluster.submit(place, text.replace(command_line, training))
        assert cluster.until_ended(job) == "IDLE"
        assert (cluster.state_of(job), known_good(run)) == ("COMPLETED", "100.1")
        assert (place / "seen").read_text().replace("_ckptguard\n", "") == seen
    assert f"training starts from {run}/net-100.safetensors" in (place / "out").read_text()


def test_scancel_in_the_middle_of_a_save(cluster: Slurm) -> None:
    """What the job had saved is verified, the part of a save that it left is not called good."""
    place = cluster.place("cancelled")
    script, run = training(place)
    half = f"head -c 2000 {place}/made/net-200.safetensors > {run}/net-300.safetensors; touch {place}/half; sleep 600"
    job = cluster.submit(place, f"{script}{half}\n", f"--comment=ckptguard={run}")
    cluster.until((place / "half").exists)
    cluster.call("scancel", job)
    assert cluster.until_ended(job) == "IDLE"
    assert cluster.state_of(job) == "CANCELLED"
    assert known_good(run) == "200.1"
    assert "net-300.safetensors has no verdict yet" in (cluster.folder / "epilog.log").read_text()


def test_an_epilog_that_is_over_its_limit(cluster: Slurm) -> None:
    """It ends in time and the node goes on. What was not read is pending, and the next epilog decides it."""
    cluster.install("epilog", example("slurm-epilog", BIN=cluster.bin, LOG=cluster.folder / "epilog.log", LIMIT=1))
    place = cluster.place("limited")
    run, made = place / "run", saves(place, 100, numbers=4_000_000)
    (place / "ckptguard.toml").write_text(f"{_SETTINGS}verify_rate = 65536\n")
    script = f"#!/bin/sh\nmkdir -p {run}\ncp -pn {made}/* {run}/\n"
    assert cluster.until_ended(cluster.submit(place, script, f"--comment=ckptguard={run}")) == "IDLE"
    assert "the limit of 1s is over" in (cluster.folder / "epilog.log").read_text()
    assert known_good(run) == ""
    (place / "ckptguard.toml").write_text(_SETTINGS)
    cluster.install("epilog", example("slurm-epilog", BIN=cluster.bin, LOG=cluster.folder / "epilog.log"))
    assert cluster.until_ended(cluster.submit(place, script, f"--comment=ckptguard={run}")) == "IDLE"
    assert known_good(run) == "100.1"


def test_a_run_that_cannot_be_read(cluster: Slurm) -> None:
    """A run that is not there, one that the job's user may not read, and names that are no runs: each is a sentence in
    the log. Another run of the same job is verified, and the node stays in use."""
    place = cluster.place("unreadable")
    script, run = training(place)
    secret = cluster.folder / "secret"
    secret.mkdir(mode=0o700)
    if cluster.uid == os.getuid():
        secret.chmod(0)
    names = (f"{place}/absent", f"{secret}/run", "--help", "$(touch$IFS/tmp/x)", "*", run)
    job = cluster.submit(place, script, "--comment=" + "\n".join(f"ckptguard={name}" for name in names))
    assert cluster.until_ended(job) == "IDLE"
    assert known_good(run) == "200.1"
    told = (cluster.folder / "epilog.log").read_text()
    assert f"{place}/absent" in told
    assert f"{secret}/run" in told
    assert "Traceback" not in told


def test_an_epilog_whose_programs_are_gone_does_not_drain_the_node(cluster: Slurm) -> None:
    """Nor does one whose log cannot be written."""
    cluster.install("epilog", example("slurm-epilog", BIN="/nowhere", LOG="/nowhere/log"))
    place = cluster.place("gone")
    script, run = training(place)
    assert cluster.until_ended(cluster.submit(place, script, f"--comment=ckptguard={run}")) == "IDLE"
    assert not (run / "_ckptguard").exists()


def gate_that_answers(cluster: Slurm, code: int) -> Path:
    """A folder with a `ckptguard` that ends with a code, and notes what it was asked."""
    folder = cluster.place(f"gate-{code}")
    gate = folder / "ckptguard"
    gate.write_text(f'#!/bin/sh\necho "$(id -u) $*" >> {folder}/asked\nexit {code}\n')
    gate.chmod(0o755)
    return folder


@pytest.mark.parametrize(
    ("gate", "code", "starts"), [("off", 13, True), ("on", 0, True), ("on", 1, True), ("on", 13, False)]
)
def test_the_prolog_holds_a_job_back(cluster: Slurm, gate: str, code: int, starts: bool) -> None:
    """It is off unless it is set to on. A job starts if the gate lets it, or cannot tell; Slurm drains the node if it
    does not."""
    programs = gate_that_answers(cluster, code)
    prolog = example("slurm-prolog", BIN=programs, LOG=cluster.folder / "prolog.log")
    cluster.install("prolog", prolog.replace("GATE=off", f"GATE={gate}"))
    place = cluster.place(f"gated-{gate}-{code}")
    job = cluster.submit(place, f"#!/bin/sh\ntouch {place}/started\n", "--comment=ckptguard=/some/run")
    if starts:
        assert cluster.until_ended(job) == "IDLE"
    else:
        cluster.until(lambda: "DRAIN" in cluster.node())
        cluster.until(lambda: cluster.state_of(job) == "PENDING")
        cluster.call("scancel", job)
    assert (place / "started").exists() == starts
    asked = (programs / "asked").read_text() if gate == "on" else ""
    assert asked == (f"{cluster.uid} gate -- /some/run\n" if gate == "on" else "")
    shutil.rmtree(programs)


@pytest.mark.parametrize("name", ["slurm-epilog", "slurm-prolog", "slurm-job"])
@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck here")
def test_shellcheck_finds_nothing(name: str, tmp_path: Path) -> None:
    """The linter of shell scripts has no remark."""
    path = tmp_path / name
    path.write_text(example(name), encoding="utf-8")
    done = subprocess.run(["shellcheck", str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
