"""The lock of a run where the file system has none, and where it fails."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os

import pytest
from support.store_operations import OPERATIONS, Stage, build
from support.tiny_run import clone, cycle, files_below

from ckptguard.errors import BusyError, DeniedError, StorageError, StorageFullError
from ckptguard.inspect.doctor import diagnose
from ckptguard.records.run import open_run
from ckptguard.runs import lock
from ckptguard.runs.lock import run_lock

NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)


@pytest.fixture(scope="module")
def templates(tmp_path_factory):
    """Runs in which every operation has something to do, by whether a save is pending."""
    made = {}
    for pending in (False, True):
        folder = tmp_path_factory.mktemp("template") / "run"
        folder.mkdir()
        build(str(folder), pending=pending)
        made[pending] = str(folder)
    return made


@pytest.fixture
def locks_fail(monkeypatch):
    """Have every lock of a file fail with an errno."""

    def fail(code):
        def flock(descriptor, operation):
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(fcntl, "flock", flock)
        lock._reported.clear()

    return fail


def done(source, folder, name):
    """What an operation leaves in a copy of the run: its own files, and the names of what lies in its records."""
    stage = Stage(url=str(folder / "run"), replica=str(folder / "replica"), dest=folder / "dest")
    clone(source, stage.url)
    OPERATIONS[name].act(open_run(stage.url), stage)
    inside = files_below(stage.url, "")
    own = {key: data for key, data in inside.items() if not key.startswith("_ckptguard/")}
    return own, {key.split("/")[1] for key in inside if key.startswith("_ckptguard/")}


@pytest.mark.parametrize("name", OPERATIONS)
def test_without_locks_everything_is_done_all_the_same(name, templates, tmp_path, locks_fail):
    """What a store does leaves the same files and kinds of records."""
    source = templates[OPERATIONS[name].pending]
    expected = done(source, tmp_path / "with", name)
    for code in NO_LOCKS:
        locks_fail(code)
        assert done(source, tmp_path / errno.errorcode[code], name) == expected


def test_it_is_told_once(templates, tmp_path, locks_fail, caplog):
    """One warning for a run, however often its lock is wanted."""
    clone(templates[True], str(tmp_path / "run"))
    locks_fail(errno.ENOLCK)
    with caplog.at_level(logging.WARNING, logger="ckptguard"):
        for _ in range(2):
            assert cycle(open_run(str(tmp_path / "run"))).could_not_tell == ()
    assert [r.getMessage() for r in caplog.records if "support locks" in r.getMessage()] == [
        f"ckptguard: {tmp_path / 'run'} does not support locks (no locks available); let only one process at a time "
        "move its files"
    ]


def test_any_other_failure_is_one_of_storage(tmp_path, locks_fail, monkeypatch):
    """It is said with its kind, and nothing is done; a lock that somebody has is busy."""
    (tmp_path / "run").mkdir()
    run = open_run(str(tmp_path / "run"))
    for code, kind in ((errno.EIO, StorageError), (errno.EAGAIN, BusyError), (errno.EPERM, DeniedError)):
        locks_fail(code)
        with pytest.raises(kind), run_lock(run, timeout=0.0):
            pytest.fail("it was not locked")

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr("ckptguard.runs.lock.open_lock", full)
    with pytest.raises(StorageFullError), run_lock(run, timeout=0.0):
        pytest.fail("it was not locked")


@pytest.mark.parametrize(("code", "answer"), [(None, "yes"), (errno.ENOSYS, "no"), (errno.EIO, "unknown")])
def test_the_doctor_says_whether_there_are_locks(tmp_path, locks_fail, code, answer):
    """A folder without them can hold checkpoints."""
    if code is not None:
        locks_fail(code)
    found = diagnose(str(tmp_path))
    [probe] = [probe for probe in found.probes if probe.name == "locks"]
    assert (probe.answer, found.outcome) == (answer, "good")
    assert json.dumps(probe.means)
