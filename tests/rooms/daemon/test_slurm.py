"""The files for Slurm, in a real Slurm: its jobs' saves are verified when they end, and its node stays in use."""

from __future__ import annotations

import dataclasses
import os
import pwd
import random
import re
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers.slurm import Slurm
from support.daemon_process import printed, save

from ckptguard.errors import NoKnownGoodError
from ckptguard.records.run import open_run
from ckptguard.runs.find_known_good import find_known_good

_SETTINGS = "settle = 0.1\n"


def example(name: str, **lines: object) -> str:
    """A printed file, with these of its lines edited."""
    text = printed(name)
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
    for name in ("epilog.log", "prolog.log"):
        if (log := slurm.folder / name).exists():
            print(log.read_text())  # shown when the test failed


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
    said = [line for line in (cluster.folder / "epilog.log").read_text().splitlines() if "net-300" in line]
    # Its writer has ended, as a look at the processes of the node shows, so it is judged at once.
    assert [line.partition(": net-300")[0].rpartition("net-300")[2] for line in said] == [".safetensors is bad"], said


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


NOBODY = 65534


@pytest.fixture
def users(cluster: Slurm) -> Slurm:
    """The cluster, with jobs of a user without rights where we may choose."""
    return dataclasses.replace(cluster, uid=NOBODY, gid=NOBODY) if os.getuid() == 0 else cluster


def gate_that_answers(cluster: Slurm, code: int | str) -> Path:
    """Have a prolog whose `ckptguard` ends with a code, or does something else, and notes what it was asked."""
    folder = cluster.place(f"gate-{uuid.uuid4().hex[:8]}")
    gate = folder / "ckptguard"
    does = f"exit {code}" if isinstance(code, int) else code
    gate.write_text(f'#!/bin/sh\necho "$(id -u) $*" >> {folder}/asked\n{does}\n')
    gate.chmod(0o755)
    install_prolog(cluster, folder)
    return folder


def install_prolog(cluster: Slurm, programs: Path, **lines: object) -> None:
    """The printed prolog, switched on."""
    cluster.install("prolog", example("slurm-prolog", GATE="on", BIN=programs, LOG=log_of(cluster), **lines))


def log_of(cluster: Slurm) -> Path:
    return cluster.folder / "prolog.log"


def asked(programs: Path) -> list[str]:
    """What the gate was asked, without who asked."""
    path = programs / "asked"
    return [line.partition(" ")[2] for line in path.read_text().splitlines()] if path.exists() else []


def until_held(cluster: Slurm, job: str, name: str | None = None) -> None:
    """Wait until a job is back in the queue and held, and the node free."""
    cluster.until(lambda: held(cluster, job, name))
    cluster.until(lambda: cluster.node() == "IDLE")


def held(cluster: Slurm, job: str, name: str | None = None) -> bool:
    """Whether a job, or a task of an array, is held."""
    said = cluster.call("squeue", "--noheader", "--states=all", "--jobs", job, "--array", "--format=%i %T %r")
    rows = [row.split(None, 2) for row in said.splitlines()]
    return any(row[0] == (name or job) and row[1] == "PENDING" and "held" in row[2].lower() for row in rows)


@pytest.mark.parametrize("code", [0, 1, 2, 11, 137])
def test_a_job_starts_where_the_gate_lets_it_or_cannot_tell(users: Slurm, code: int) -> None:
    """The gate is asked with the rights of the job's user, and the node stays in use."""
    programs = gate_that_answers(users, code)
    place = users.place(f"started-{code}")
    job = users.submit(place, f"#!/bin/sh\ntouch {place}/started\n", f"--comment=ckptguard={place}")
    assert users.until_ended(job) == "IDLE"
    assert (place / "started").exists()
    assert (programs / "asked").read_text() == f"{users.uid} gate -- {place}\n"


def test_a_prolog_is_off_until_somebody_switches_it_on(users: Slurm) -> None:
    """As it is printed, no job is held, whatever its comment says."""
    users.install("prolog", example("slurm-prolog", BIN="/nowhere", LOG=log_of(users)))
    place = users.place("off")
    job = users.submit(place, f"#!/bin/sh\ntouch {place}/started\n", "--comment=ckptguard=/nowhere")
    assert users.until_ended(job) == "IDLE"
    assert (place / "started").exists()


@pytest.mark.parametrize("case", [3, 13, "missing", "a file", "a dangling link", "another user's", "a link"])
def test_a_job_that_must_not_start_is_held(users: Slurm, case: int | str) -> None:
    """A bad run, one that does not exist, and one of another user hold the job, and its AdminComment says why. The node
    stays in use and another job runs. The user lets the job go, and it starts."""
    if case in ("another user's", "a link") and os.getuid() != 0:
        pytest.skip("only root has files of two users")
    programs = gate_that_answers(users, case if isinstance(case, int) else 0)
    place = users.place(f"held-{case}".replace(" ", "-").replace("'", ""))
    run, others = place / "run", place / "others"
    if case == "a file":
        run.write_text("no folder")
    elif case == "a dangling link":
        run.symlink_to("nowhere")
    elif case == "another user's":
        run.mkdir()
    elif case == "a link":
        others.mkdir()
        run.symlink_to(others)
    elif case != "missing":
        run.mkdir()
        os.chown(run, users.uid, users.gid)
    job = users.submit(place, f"#!/bin/sh\ntouch {place}/started\n", f"--comment=ckptguard={run}")
    until_held(users, job)
    assert not (place / "started").exists()
    assert f"AdminComment=ckptguard: {run}: " in users.call("scontrol", "show", "job", job)
    line = rf"(?m)^\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d job {job}: it is held: {re.escape(str(run))}: "
    assert re.search(line, log_of(users).read_text())
    other = users.submit(place, f"#!/bin/sh\ntouch {place}/other\n")
    users.until(lambda: users.state_of(other) == "COMPLETED")
    assert (place / "other").exists()
    shutil.rmtree(programs)
    gate_that_answers(users, 0)
    run.unlink() if run.is_symlink() or run.is_file() else None
    run.mkdir(exist_ok=True)
    os.chown(run, users.uid, users.gid)
    as_user = ("setpriv", "--reuid", str(users.uid), "--regid", str(users.gid), "--clear-groups")
    users.call(*(as_user if os.getuid() == 0 else ()), "scontrol", "release", job)
    users.until(lambda: (place / "started").exists())
    users.until(lambda: users.node() == "IDLE")


def test_a_job_that_cannot_be_requeued_is_cancelled(users: Slurm) -> None:
    """It must not start from nothing good; the node stays in use."""
    gate_that_answers(users, 13)
    place = users.place("cancelled-by-prolog")
    script = f"#!/bin/sh\ntouch {place}/started\n"
    job = users.submit(place, script, f"--comment=ckptguard={place}", "--no-requeue")
    assert users.until_ended(job) == "IDLE"
    assert users.state_of(job) == "CANCELLED"
    assert not (place / "started").exists()


def test_a_gate_that_never_answers(users: Slurm) -> None:
    """A storage that hangs, or a process that cannot be ended: the job starts when the time is up."""
    programs = gate_that_answers(users, "trap '' TERM; setsid sleep 300 & sleep 300")
    install_prolog(users, programs, LIMIT=1)
    place = users.place("hangs")
    job = users.submit(place, f"#!/bin/sh\ntouch {place}/started\n", f"--comment=ckptguard={place}")
    assert users.until_ended(job) == "IDLE"
    assert (place / "started").exists()
    assert "the gate could not tell (no answer)" in log_of(users).read_text()


def test_a_run_that_cannot_be_entered(users: Slurm) -> None:
    """Its user cannot say what is in there, so it is not held."""
    gate_that_answers(users, 0)
    place = users.place("locked")
    (place / "run").mkdir(mode=0)
    job = users.submit(place, f"#!/bin/sh\ntouch {place}/started\n", f"--comment=ckptguard={place}/run/inner")
    if users.uid == 0:
        until_held(users, job)  # root can say that it is missing
        users.call("scancel", job)
        return
    assert users.until_ended(job) == "IDLE"
    assert (place / "started").exists()


def test_only_one_task_of_an_array_is_held(users: Slurm) -> None:
    """`%a`, `%A`, `%j` and `%u` stand for what Slurm calls so. The task whose run is missing is held; its siblings,
    also the one whose number is that of the array, run."""
    programs = gate_that_answers(users, 0)
    place = users.place("array")
    for task in (0, 2):
        (place / f"run-{task}").mkdir()
        os.chown(place / f"run-{task}", users.uid, users.gid)
    script = f"#!/bin/sh\ntouch {place}/started-$SLURM_ARRAY_TASK_ID\n"
    array = users.submit(place, script, f"--comment=ckptguard={place}/run-%a", "--array=0-2")
    until_held(users, array, f"{array}_1")
    users.until(lambda: all((place / f"started-{task}").exists() for task in (0, 2)))
    assert not (place / "started-1").exists()
    assert sorted(asked(programs)) == [f"gate -- {place}/run-{task}" for task in (0, 2)]
    users.call("scancel", array)
    (place / f"{users.uid}").mkdir()
    named = f"ckptguard={place}/{users.uid}-%A-%j-%u-%%"
    job = users.submit(place, script, f"--comment={named}")
    until_held(users, job)
    assert (
        f"{place}/{users.uid}-{job}-{job}-{pwd.getpwuid(users.uid).pw_name}-%: there is no" in log_of(users).read_text()
    )
    users.call("scancel", job)


@pytest.mark.parametrize("spelled", ["file://{}", "local://{}", "/{}", "/..{}", "file:///../.{}/", "{}/./"])
def test_each_spelling_of_a_folder_is_that_folder(users: Slurm, spelled: str) -> None:
    """The folder is looked at that the gate would open, however it is written: a missing one holds the job."""
    programs = gate_that_answers(users, 0)
    place = users.place(f"spelled-{uuid.uuid4().hex[:8]}")
    script = f"#!/bin/sh\ntouch {place}/started\n"
    job = users.submit(place, script, f"--comment=ckptguard={spelled.format(place / 'run')}")
    until_held(users, job)
    users.call("scancel", job)
    assert asked(programs) == []
    assert not (place / "started").exists()


AROUND = (
    "simplecache::file:///etc",
    "s3://a::file:///etc",
    "dir:///etc",
    "file://etc",
    "asynclocal:///etc",
    "file:/etc",
)
AROUND += ("git:///etc", "s3:///etc", "memory://a", "/etc/run-%a", "/etc/%x", "/etc/%")


@pytest.mark.parametrize("number", range(3))
def test_what_names_no_run_holds_the_job(users: Slurm, number: int) -> None:
    """A way around to a disk of this machine, and a sign that means nothing here, such as %a outside an array: no gate
    is asked, and no job starts unguarded that was meant to be guarded. The log has each, the AdminComment the first."""
    programs, words = gate_that_answers(users, 0), AROUND[number::3]
    place = users.place(f"no-run-{number}")
    comment = " ".join(f"ckptguard={word}" for word in (place, *words))
    job = users.submit(place, f"#!/bin/sh\ntouch {place}/started\n", f"--comment={comment}")
    until_held(users, job)
    assert "AdminComment=ckptguard: " in users.call("scontrol", "show", "job", job)
    users.call("scancel", job)
    assert not (place / "started").exists()
    assert asked(programs) == []
    said = log_of(users).read_text()
    assert [word for word in words if f"job {job}: it names no run: {word}: " not in said] == []


def test_a_bucket_is_asked_for(users: Slurm) -> None:
    """As a run on a disk is, with the signs of the comment."""
    programs = gate_that_answers(users, 0)
    place = users.place("bucket")
    job = users.submit(place, f"#!/bin/sh\ntouch {place}/started\n", "--comment=ckptguard=s3://bucket/%u")
    assert users.until_ended(job) == "IDLE"
    assert (place / "started").exists()
    assert asked(programs) == [f"gate -- s3://bucket/{pwd.getpwuid(users.uid).pw_name}"]


WORDS = (
    "ckptguard=",
    "CKPTGUARD=/x",
    "ckptguard",
    "=",
    "$(touch HERE)",
    "`touch HERE`",
    ";touch HERE;",
    "'",
    '"',
    "\\",
)
SIGNS = ("\n", "\t", " ", "\u00a0", "\x1b[31m", "\u00e9", "\u4e2d", "*", "~", "&& false", "| false", "%s", "%n", "%a")
PATHS = ("../x", "-rf", "--help", "x/y", "$HOME", "*", "/x;y", "/x$(id)", "/x`id`", "/x'y", '/x"y', "/x|y", "", "=/x")


def comments(seed: int) -> Iterator[str]:
    """Comments that name no run: words of a user, and what looks like ours and is not."""
    chance = random.Random(seed)
    yield "x" * 1000  # Slurm takes no longer ones
    for _ in range(10):
        parts = [chance.choice(WORDS + SIGNS) for _ in range(chance.randint(1, 30))]
        parts += [f" ckptguard={path} " for path in chance.sample(PATHS, 3)]
        chance.shuffle(parts)
        yield re.sub(r"ckptguard=(?=/|[a-z]+:)", "ckptguard=.", " ".join(parts))[:1000]


def test_a_comment_of_a_user_is_only_text(users: Slurm) -> None:
    """Whatever is in it, nothing of it is run, no gate is asked, the job starts, and the node stays in use. A run that
    is named between such words is asked for, by its name alone."""
    programs = gate_that_answers(users, 0)
    place, here = users.place("comments"), users.folder / "touched"
    script = f"#!/bin/sh\necho >> {place}/started\n"
    made = [comment.replace("HERE", str(here)) for comment in comments(13)]
    for named in (False, True):
        for comment in made if not named else made[2:6]:
            text = f"{comment[:900]} ckptguard={place}" if named else comment
            users.submit(place, script, f"--comment={text}")
    count = len(made) + 4
    users.until(lambda: (place / "started").exists() and len((place / "started").read_text()) == count)
    users.until(lambda: users.node() == "IDLE")
    assert asked(programs) == [f"gate -- {place}"] * 4
    assert not here.exists()
    assert not re.search(r"[^\x20-\x7e\n\u00a0-\uffff]", log_of(users).read_text())


def test_tasks_that_save_nothing_cost_no_checkpoint(cluster: Slurm) -> None:
    """Three tasks of an array, twice, start from one run and save nothing: the good checkpoints stay. Starts of one job
    that is requeued count, and those of its prolog and its own gate are one."""
    place = cluster.place("savers")
    run = place / "run"
    run.mkdir()
    (place / "ckptguard.toml").write_text(_SETTINGS)
    for step in (100, 200):
        save(run, step)
    for path in (run, *run.iterdir()):
        os.chown(path, cluster.uid, cluster.gid)
    install_prolog(cluster, cluster.bin)
    begun = f"{place}/begun"
    script = f"#!/bin/sh\n{cluster.bin}/ckptguard gate {run} -- sh -c 'ls {run} | grep net >> {begun}'\n"
    for _ in range(2):
        job = cluster.submit(place, script, f"--comment=ckptguard={run}", "--array=0-2")
        cluster.until(lambda job=job: not cluster.call("squeue", "--noheader", "--jobs", job).strip())
    assert Path(begun).read_text().split() == ["net-100.safetensors", "net-200.safetensors"] * 6
    once = f"#!/bin/sh\n{cluster.bin}/ckptguard gate {run} -- sh -c 'ls {run} | grep net > {begun}'\n"
    again = f'{once}[ "${{SLURM_RESTART_COUNT:-0}}" = 3 ] || exec scontrol requeue $SLURM_JOB_ID\n'
    job = cluster.submit(place, again, f"--comment=ckptguard={run}")
    cluster.until(lambda: Path(begun).read_text().split() == ["net-100.safetensors"])
    cluster.until_ended(job)
    restarts = re.search(r"Restarts=(\d+)", cluster.call("scontrol", "show", "job", job))
    assert restarts is not None
    assert restarts[1] == "3"


@pytest.mark.parametrize("name", ["slurm-epilog", "slurm-prolog", "slurm-job"])
@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck here")
def test_shellcheck_finds_nothing(name: str, tmp_path: Path) -> None:
    """The linter of shell scripts has no remark."""
    path = tmp_path / name
    path.write_text(example(name), encoding="utf-8")
    done = subprocess.run(["shellcheck", str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
