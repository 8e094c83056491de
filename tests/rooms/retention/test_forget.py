"""`ckptguard forget`: the records of a run that is gone go, and nothing else."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.tiny_run import TINY, cycle, opened, save

from ckptguard.cli.entry import commands
from ckptguard.errors import BusyError, CkptguardError, NotFoundError, SettingsError
from ckptguard.records.daemon_record import DaemonRecord, write_daemon_record
from ckptguard.records.keys import RECORDS, is_record
from ckptguard.records.leases import begin_training, claim_path
from ckptguard.records.lineage import begin_lineage
from ckptguard.records.room import RoomProblem, write_room_problem
from ckptguard.records.run import open_run
from ckptguard.retention.forget import forget
from ckptguard.retention.prune import prune_by_settings
from ckptguard.runs.run_view import open_view
from ckptguard.values.settings import Settings

RUNS = Path(__file__).parents[3]


def make(run: Path, settings: Settings = TINY) -> None:
    """A run with a verdict and a kept copy, all of whose files were removed."""
    save(str(run), 100, 1)
    cycle(open_run(str(run), settings), settings)
    shutil.rmtree(run / "model-100")


def test_a_run_that_is_there_is_left_alone(tmp_path):
    """Whatever is in it besides records, nothing is removed."""
    run = tmp_path / "run"
    make(run)
    (run / "notes.txt").write_text("mine")
    before = sorted(run.rglob("*"))
    with pytest.raises(BusyError, match=r"notes\.txt"):
        forget(open_view(str(run), TINY), force=True)
    assert sorted(run.rglob("*")) == before


def test_copies_go_only_by_force(tmp_path):
    """They may be the only ones. A dry run says how many there are."""
    run = tmp_path / "run"
    make(run)
    before = sorted(run.rglob("*"))
    with pytest.raises(BusyError, match="files of checkpoints"):
        forget(open_view(str(run), TINY))
    assert forget(open_view(str(run), TINY), dry_run=True).copies == 2
    assert sorted(run.rglob("*")) == before
    assert forget(open_view(str(run), TINY), force=True).copies == 2
    assert not run.exists()


def test_a_training_keeps_its_records(tmp_path):
    """It has saved nothing yet, but will."""
    run = tmp_path / "run"
    run.mkdir()
    begin_training(opened(str(run)), "model-#", loops=True)
    with pytest.raises(BusyError, match="training"):
        forget(open_view(str(run), TINY))
    assert (run / "_ckptguard").exists()


def test_records_elsewhere_go_and_what_is_beside_them_stays(tmp_path):
    """The run itself is gone already."""
    run, records = tmp_path / "run", tmp_path / "records"
    settings = TINY.changed(records=str(records), keep="none")
    make(run, settings)
    shutil.rmtree(run)
    (records / "mine.txt").write_text("mine")
    forget(open_view(str(run), settings, must_exist=False), force=True)
    assert [path.name for path in records.iterdir()] == ["mine.txt"]
    assert not run.exists()


def test_half_of_the_records_are_enough(tmp_path):
    """A removal that failed may have left any of them."""
    run = tmp_path / "run"
    (run / "_ckptguard" / "ledger" / "held.x.held").mkdir(parents=True)
    (run / "_ckptguard" / "daemon.json").write_text("{}")
    forget(open_view(str(run), TINY))
    assert not run.exists()
    with pytest.raises(NotFoundError):
        forget(open_view(str(run), TINY, must_exist=False))


def test_the_command_says_what_it_did(tmp_path):
    """As text and as JSON, with the codes of its page."""
    run = tmp_path / "run"
    make(run)

    def ckptguard(*words: str):
        return CliRunner().invoke(commands, list(words))

    status = ckptguard("status", str(run))
    assert (status.exit_code, "ended" in status.output) == (0, True)
    assert ckptguard("forget", str(run)).exit_code == 11
    done = ckptguard("forget", str(run), "--force", "--json")
    assert (done.exit_code, json.loads(done.stdout)["copies"]) == (0, 2)
    assert ckptguard("forget", str(run)).exit_code == 10


def test_all_names_of_records_are_known():
    """Those of the reference, and no others."""
    page = (RUNS / "docs/reference/records.md").read_text()
    table = page[page.index("\n## Files") : page.index("\n## ", page.index("\n## Files") + 5)]
    rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    keys = [key for row in rows for key in re.findall(r"`([^`]+)`", row) if not key.startswith("<")]
    tops = {key.partition("/")[0] for key in keys}
    assert tops <= RECORDS
    assert {"kept", "ledger", "daemon.json"} <= tops


def fill(folder: Path) -> dict[str, bytes]:
    """A user's folder with names of its own that are also names at the top of our records."""
    for top in sorted(RECORDS - {"format.json", "run.json"}):
        if "." in top or top == "lock":
            (folder / top).write_text("mine")
            continue
        for name in ("mine.txt", "mine.json", "part/mine.json", "part/2024.1/mine.bin", "0.1.json", f"{'0' * 32}.pt"):
            path = folder / top / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("mine")
    return contents(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_files_of_the_user_in_a_folder_for_records_stay(tmp_path):
    """The folder had other files, in folders of the same names as ours. What is removed for good later, too."""
    run, records = tmp_path / "run", tmp_path / "project"
    settings = TINY.changed(records=str(records), trash_grace=0.0, keep_last=1)
    records.mkdir()
    for step in (100, 200, 300):
        save(str(run), step, step)
    mine = fill(records)
    for name in ("daemon.json", "lineage.json", "room.json", "saving", "trainings"):
        # No records begin beside these. A folder in `trainings` is an error of every reader.
        shutil.rmtree(records / name) if "." not in name else (records / name).unlink()
    mine = contents(records)
    opened_run = open_run(str(run), settings)
    cycle(opened_run, settings)
    for _ in range(2):
        prune_by_settings(open_view(str(run), settings))
    assert mine.items() <= contents(records).items()
    ours = set(contents(records)) - set(mine)
    assert {key for key in ours if not is_record(key)} == set()
    shutil.rmtree(run)
    forget(open_view(str(run), settings, must_exist=False), force=True)
    assert contents(records) == mine


NAMES_OF_RECORDS = ("daemon.json", "lineage.json", "room.json", "saving/mine.json", "trainings/mine.json")
CONTENTS = ("mine", "{}", "[]", '{"format": 1}', '{"format": 1, "owner": "me", "since": "now"}', "\xff")


@pytest.mark.parametrize("name", [*NAMES_OF_RECORDS, "starts/7.json", f"seen/{'0' * 32}.json"])
def test_no_records_begin_beside_a_file_with_the_name_of_one(tmp_path, name):
    """Whoever asks for records there gets one sentence, and the file stays as it is, beside a daemon and a guard, too.
    A folder of its own is taken."""
    run, records = tmp_path / "run", tmp_path / "project"
    settings = TINY.changed(records=str(records))
    save(str(run), 100, 1)
    (records / name).parent.mkdir(parents=True)
    (records / name).write_text("mine")
    opened_run = open_run(str(run), settings)
    here = DaemonRecord(address="/nowhere", host="h", boot_id="b", pid=1, started_at="now")
    for begin in (
        lambda: cycle(opened_run, settings),
        lambda: write_daemon_record(opened_run, here),
        lambda: begin_training(opened_run, "model-#", loops=True),
        lambda: write_room_problem(opened_run, RoomProblem(problem="too little")),
    ):
        with contextlib.suppress(CkptguardError):
            begin()
        assert contents(records).items() - {("lock", b"")} == {(name, b"mine")}
    with pytest.raises(SettingsError, match=re.escape(name)):
        write_daemon_record(opened_run, here)
    shutil.rmtree(run / "model-100")
    with pytest.raises(NotFoundError):
        forget(open_view(str(run), settings), force=True)
    assert (records / name).read_text() == "mine"
    write_daemon_record(open_run(str(run), TINY.changed(records=str(tmp_path / "own"))), here)


@pytest.mark.parametrize("content", CONTENTS)
def test_what_holds_no_record_is_not_removed_as_one(tmp_path, content):
    """Files that came beside the records later, with names of records: those that we wrote go, and these stay."""
    run, records = tmp_path / "run", tmp_path / "project"
    settings = TINY.changed(records=str(records), keep="none")
    make(run, settings)
    shutil.rmtree(run)
    for name in NAMES_OF_RECORDS:
        (records / name).parent.mkdir(exist_ok=True)
        (records / name).write_text(content)
    forget(open_view(str(run), settings, must_exist=False), force=True)
    assert sorted(contents(records)) == sorted(NAMES_OF_RECORDS)


def test_every_record_is_known_by_what_it_holds(tmp_path, monkeypatch):
    """Those whose names a user's file may have, too, go with the others. The training has ended by then."""
    run, records = tmp_path / "run", tmp_path / "project"
    settings = TINY.changed(records=str(records))
    make(run, settings)
    there = open_run(str(run), settings)
    write_daemon_record(there, DaemonRecord(address="/nowhere", host="h", boot_id="b", pid=1, started_at="now"))
    write_room_problem(there, RoomProblem(problem="too little"))
    begin_lineage(there)
    claim_path(there, path="model-300", series="model-#", step=300, generation=1)
    begin_training(there, "model-#", loops=True)
    monkeypatch.setattr("ckptguard.retention.forget.surely_gone", lambda *_: True)
    tops = {key.partition("/")[0] for key in contents(records)}
    assert tops >= {"daemon.json", "lineage.json", "room.json", "saving", "trainings"}
    shutil.rmtree(run)
    forget(open_view(str(run), settings, must_exist=False), force=True)
    assert not records.exists()


def test_a_folder_that_holds_no_records_is_never_emptied(tmp_path):
    """A path that is mistyped, and a folder of the user's as the place of the records: nothing goes."""
    records = tmp_path / "project"
    records.mkdir()
    mine = fill(records)
    settings = TINY.changed(records=str(records))
    for force in (False, True):
        with pytest.raises(NotFoundError):
            forget(open_view(str(tmp_path / "typo"), settings, must_exist=False), force=force)
    assert contents(records) == mine


def test_records_of_a_run_that_has_another_path_stay(tmp_path):
    """Its disk may only be away for now."""
    run, records = tmp_path / "run", tmp_path / "records"
    settings = TINY.changed(records=str(records))
    make(run, settings)
    run.rename(tmp_path / "away")
    before = contents(records)
    with pytest.raises(NotFoundError):
        forget(open_view(str(tmp_path / "typo"), settings, must_exist=False), force=True)
    assert contents(records) == before
