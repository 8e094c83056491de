"""Clean takes away what is ours, but no bytes of a checkpoint that are nowhere else, whenever it is killed."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from support.crashes import Killed
from support.records_on_disk import files_of
from support.tiny_run import TINY, WEIGHTS, clone, content, cycle, delete, name_of, opened, poison, rot, save
from support.views import look

from ckptguard.errors import BusyError, NoKnownGoodError, NotFoundError, StorageError
from ckptguard.inspect.list_states import survey
from ckptguard.records.daemon_record import DaemonRecord, write_daemon_record
from ckptguard.records.leases import begin_training, claim_path
from ckptguard.records.nodes import lead
from ckptguard.records.pins import IN_USE, pin_checkpoint
from ckptguard.records.run import Run
from ckptguard.records.who_and_when import this_host
from ckptguard.recover.roll_back import GoBack, roll_back
from ckptguard.retention.prune import prune
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.runs.lock import run_lock
from ckptguard.scan.reread import WrongFile, reread
from ckptguard.storage import Storage
from ckptguard.storage.local.local_storage import LocalStorage
from ckptguard.storage.local.removal import begin_again
from ckptguard.upkeep.clean import Cleaned, Right, clean
from ckptguard.values.ids import CheckpointId
from ckptguard.values.verdict import Outcome
from ckptguard.verification.target import verify_target

GOOD = {content(seed)[WEIGHTS] for seed in range(1, 9)}


def double(run: str) -> None:
    """Two saves in place, with their kept copies."""
    for number in (1, 2):
        save(run, 100 * number, number)
        cycle(opened(run))


def alone(run: str) -> None:
    """Of the newest save only the kept copy is left."""
    double(run)
    delete(run, 200)


def rotted(run: str) -> None:
    """The newest save was good, and is bad in place; its kept copy is not."""
    double(run)
    rot(run, f"{name_of(200)}/{WEIGHTS}")
    assert verify_target(run, TINY).outcome is Outcome.BAD


def changed(run: str) -> None:
    """Something else was saved over the newest save, and nobody has looked at it."""
    double(run)
    save(run, 200, 7)


def quarantined(run: str) -> None:
    """A save with NaN was moved aside."""
    double(run)
    save(run, 300, 3)
    poison(Path(run, name_of(300), WEIGHTS))
    cycle(opened(run))
    roll_back(look(run), GoBack(reason="test"))


def trashed(run: str) -> None:
    """The policy took a save away a moment ago."""
    double(run)
    save(run, 300, 3)
    cycle(opened(run))
    settings = TINY.changed(keep_good=1, keep_last=1)
    assert prune(look(run, settings), settings.retention(), grace=1e9).removed


MADE: dict[str, Callable[[str], None]] = {
    made.__name__: made for made in (double, alone, rotted, changed, quarantined, trashed)
}


@pytest.fixture(params=MADE)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A run in one of these states."""
    MADE[request.param](str(tmp_path / "run"))
    return str(tmp_path / "run")


def weights(run: str) -> set[bytes]:
    """The content of all weights in a run, wherever they lie."""
    return {path.read_bytes() for path in Path(run).rglob("*") if WEIGHTS in path.name and path.is_file()}


def copies(run: str) -> list[Path]:
    """The weights that are kept."""
    return [path for path in Path(run, "_ckptguard", "kept").rglob("*") if WEIGHTS in path.name and path.is_file()]


def of_the_trainer(run: str) -> dict[str, bytes]:
    """The files in place."""
    return {key: data for key, data in files_of(run).items() if not key.startswith("_ckptguard/")}


def cleaned(run: str, **how: Any) -> Cleaned:
    """As a new process does it."""
    begin_again(f"{run}/_ckptguard")
    return clean(look(run, TINY), **how)


@contextlib.contextmanager
def killed_at(number: int) -> Iterator[list[int]]:
    """Nothing is removed from the n-th file or folder on."""
    done = [0]

    def counted(real: Callable[..., None]) -> Callable[..., None]:
        def call(*given: Any, **more: Any) -> None:
            done[0] += 1
            if done[0] >= number:
                raise Killed
            real(*given, **more)

        return call

    with mock.patch("os.unlink", counted(os.unlink)), mock.patch("os.rmdir", counted(os.rmdir)):
        yield done


def test_nothing_that_is_nowhere_else_goes(made: str) -> None:
    """And what a trainer wrote is as it was. What stays can be found; without such copies all records go."""
    before, own, planned = weights(made), of_the_trainer(made), cleaned(made, dry_run=True)
    assert (weights(made), of_the_trainer(made)) == (before, own)
    done = cleaned(made)
    assert (weights(made), of_the_trainer(made)) == (before, own)
    assert (done.removed, done.stays) == (planned.removed, planned.stays)
    assert bool(done.stays) == os.path.exists(f"{made}/_ckptguard")
    assert bool(done.stays) == (before > {data for key, data in own.items() if key.endswith(WEIGHTS)})
    assert sum(kind.bytes for kind in done.removed if kind.kind == "kept") > 0


def rotted_unseen(run: str) -> None:
    """The newest save rots in place: its size, times and inode are as they were."""
    path = Path(run, name_of(200), WEIGHTS)
    before = path.stat()
    rot(run, f"{name_of(200)}/{WEIGHTS}")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_copy_of_what_rotted_in_place_stays(tmp_path: Path) -> None:
    """The bytes decide, not what storage says of them. It is said, in the plan and afterwards; the other copy goes."""
    run = str(tmp_path / "run")
    double(run)
    rotted_unseen(run)
    for planned in (True, False):
        done = cleaned(run, dry_run=planned)
        [reason] = done.reasons
        assert "model-200 stays: in place model-200/model.safetensors is wrong: its bytes differ" in reason
        assert {(kind.kind, kind.files) for kind in done.stays} >= {("kept", 2)}
        assert content(2)[WEIGHTS] in weights(run)
    assert verify_target(run, TINY).outcome is Outcome.BAD  # and can be repaired
    assert find_known_good(opened(run)).step == 200


def test_a_copy_of_what_cannot_be_read_in_place_stays(tmp_path: Path) -> None:
    """And that is said."""
    run = str(tmp_path / "run")
    double(run)

    def broken(storage: Storage, key: str, *more: Any) -> WrongFile | None:
        if key == f"{name_of(200)}/{WEIGHTS}":
            raise StorageError("the disk does not answer", key=key)
        return reread(storage, key, *more)

    with mock.patch("ckptguard.upkeep.clean.reread", broken):
        assert cleaned(run).reasons == ("the protected copy of model-200 stays: the disk does not answer",)
    assert [path.read_bytes() for path in copies(run)] == [content(2)[WEIGHTS]]


@pytest.mark.parametrize("meanwhile", [rotted_unseen, lambda run: delete(run, 200), lambda run: save(run, 200, 7)])
def test_what_happens_in_place_after_it_was_read_keeps_its_copy(
    tmp_path: Path, meanwhile: Callable[[str], None]
) -> None:
    """Between the question and its answer, and before the lock. What did not change is read once."""
    run, read = str(tmp_path / "run"), list[str]()
    double(run)
    right: Right = {}

    def counted(storage: Storage, key: str, *more: Any) -> WrongFile | None:
        read.append(key)
        return reread(storage, key, *more)

    with mock.patch("ckptguard.upkeep.clean.reread", counted):
        planned = cleaned(run, dry_run=True, right=right)
        assert (planned.reasons, len(read)) == ((), 4)  # two files of each save
        meanwhile(run)
        with mock.patch("ckptguard.upkeep.clean._read_in_place", return_value=()):  # as if it came after that
            cleaned(run, right=right)
    assert len(read) == 4
    assert [path.read_bytes() for path in copies(run)] == [content(2)[WEIGHTS]]


def test_a_copy_of_links_needs_no_reading(tmp_path: Path) -> None:
    """It has the bytes of the file in place, right or not."""
    run = str(tmp_path / "run")
    save(run, 100, 1)
    cycle(opened(run), TINY.changed(keep="link"))
    with mock.patch("ckptguard.upkeep.clean.reread", side_effect=AssertionError):
        assert cleaned(run).stays == ()


def test_the_second_of_two_has_nothing_to_do(tmp_path: Path) -> None:
    """The first one finished while it waited for the lock."""
    run = str(tmp_path / "run")
    double(run)

    @contextlib.contextmanager
    def late(of: Run) -> Iterator[None]:
        with run_lock(of):
            shutil.rmtree(f"{run}/_ckptguard")
            yield

    with mock.patch("ckptguard.upkeep.clean.run_lock", late), pytest.raises(NotFoundError, match="no records"):
        cleaned(run)


def test_everything_goes_if_it_is_asked_for(made: str) -> None:
    """The run is as the trainer left it, and can be verified anew."""
    own = of_the_trainer(made)
    assert cleaned(made, everything=True).stays == ()
    assert not os.path.exists(f"{made}/_ckptguard")
    assert of_the_trainer(made) == own
    with pytest.raises(NotFoundError, match="no records"):
        cleaned(made)
    verify_target(made, TINY)


@pytest.mark.parametrize("everything", [False, True])
def test_a_run_can_be_read_wherever_it_was_killed(made: str, everything: bool, tmp_path: Path) -> None:
    """Before every single removal: the trainer's files and the only copies are there, nothing bad counts as good, all
    can be listed and verified, and another clean comes to the same end."""
    whole, own, number = weights(made), of_the_trainer(made), 0
    while True:
        number += 1
        run = str(tmp_path / f"run{number}")
        clone(made, run)
        with killed_at(number) as removals, contextlib.suppress(Killed):
            cleaned(run, everything=everything)
        assert of_the_trainer(run) == own
        assert everything or weights(run) == whole
        begin_again(f"{run}/_ckptguard")
        with contextlib.suppress(NoKnownGoodError, NotFoundError):
            found = find_known_good(opened(run))
            assert Path(found.path, WEIGHTS).read_bytes() in GOOD
        survey(look(run))
        verify_target(run, TINY)
        cleaned(run, everything=everything)
        assert everything or weights(run) == whole
        assert of_the_trainer(run) == own
        if removals[0] < number:
            break
        shutil.rmtree(run)
    assert number > 3


def test_after_a_kill_another_clean_removes_the_rest(tmp_path: Path) -> None:
    """Wherever it was killed: what is in place is still known to be, until no copy of it is left."""
    double(str(tmp_path / "run"))
    for number in range(1, 100):
        run = str(tmp_path / f"run{number}")
        clone(str(tmp_path / "run"), run)
        with killed_at(number) as removals, contextlib.suppress(Killed):
            cleaned(run)
        if files_of(run, "_ckptguard"):
            assert cleaned(run).stays == ()
        assert not files_of(run, "_ckptguard")
        if removals[0] < number:
            return
    raise AssertionError("it was always killed")


def test_what_says_whether_a_copy_is_good_goes_first(tmp_path: Path) -> None:
    """Manifests before verdicts, and the mark of each copy before its files: half of either would say too much."""
    run, removed = str(tmp_path / "run"), list[str]()
    quarantined(run)
    remove = LocalStorage.remove

    def noted(storage: LocalStorage, key: str) -> None:
        removed.append(key)
        remove(storage, key)

    with mock.patch.object(LocalStorage, "remove", noted):
        cleaned(run, everything=True)
    marks = [key for key in removed if key.startswith(("kept/", "quarantine/"))]
    assert len(marks) >= 4  # of two copies, and of what is in quarantine two
    assert all(key.endswith((".json", ".moved")) for key in marks)
    assert removed[0] == "manifests"
    assert max(map(removed.index, marks)) < min(map(removed.index, ("kept", "quarantine", "ledger", "format.json")))


def guarded(run: str) -> None:
    """A daemon has the run."""
    host, boot_id = this_host()
    record = DaemonRecord(address="/nowhere", host=host, boot_id=boot_id, pid=os.getpid(), started_at="now")
    write_daemon_record(opened(run), record)


USES: dict[str, Callable[[str], object]] = {
    "a daemon guards": guarded,
    "a training of": lambda run: begin_training(opened(run), "model-#", loops=True),
    "is still running": lambda run: claim_path(opened(run), path="model-900", series="model-#", step=900, generation=1),
    "a training of .* is": lambda run: lead(opened(run), "job", 2),
    "are in use": lambda run: pin_checkpoint(
        opened(run), CheckpointId("model-#", 200, 1), reason=IN_USE, note="restore"
    ),
}


@pytest.mark.parametrize("said", USES)
def test_a_run_in_use_is_left_alone(said: str, tmp_path: Path) -> None:
    """By a daemon, a training, a save, or what reads a copy. One sentence says which; also with `everything`."""
    run = str(tmp_path / "run")
    double(run)
    USES[said](run)
    before = files_of(run)
    for everything in (False, True):
        with pytest.raises(BusyError, match=said):
            cleaned(run, everything=everything)
    assert files_of(run) == before


def test_what_supervises_without_a_record_is_asked_for(tmp_path: Path) -> None:
    """The caller knows."""
    run = str(tmp_path / "run")
    double(run)
    with pytest.raises(BusyError, match="still running"):
        cleaned(run, used=lambda: True)


def test_records_elsewhere_go_and_files_of_the_user_stay(tmp_path: Path) -> None:
    """Those beside our records in the same folder."""
    run, records = str(tmp_path / "run"), tmp_path / "records"
    settings = TINY.changed(records=str(records))
    save(run, 100, 1)
    cycle(look(run, settings).run, settings)
    (records / "kept").mkdir(exist_ok=True)
    (records / "kept" / "mine.txt").write_text("mine")
    own = of_the_trainer(run)
    clean(look(run, settings))
    assert [path.name for path in records.rglob("*") if path.is_file()] == ["mine.txt"]
    assert of_the_trainer(run) == own


def test_random_numbers_beside_the_users_own_files_are_nowhere_else(tmp_path: Path) -> None:
    """They stay, with the records."""
    run = str(tmp_path / "run")
    double(run)
    beside = Path(run, "_ckptguard", "training", "model-100.1.0001.json")
    beside.parent.mkdir()
    beside.write_text("{}")
    assert "training" in {kind.kind for kind in cleaned(run).stays}
    assert beside.exists()
    assert find_known_good(opened(run)).step == 200
