"""Bytes of our own: what a trainer writes, by whatever way, leaves a checkpoint that comes back byte for byte."""

import shutil
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.records_on_disk import at
from support.runs import QUICK, state_dict
from support.views import look

from ckptguard.decisions.room import SPARE
from ckptguard.errors import StorageFullError
from ckptguard.inspect.status import status
from ckptguard.records.kept import list_kept, read_kept
from ckptguard.records.run import open_run
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.runs.work import PLAIN, Work
from ckptguard.storage.local import local_storage
from ckptguard.upkeep.finish_copies import copy_independently
from ckptguard.upkeep.reconcile import PassNotes, reconcile


def save(path, seed):
    """As a training script does: through the inode that is there."""
    torch.save(state_dict(seed, layers=1, width=8), path)


def how_kept(run):
    """The kinds of the kept copies, by id."""
    return {str(id): copy.how for id in list_kept(run) if (copy := read_kept(run, id)) is not None}


def known_bytes(run):
    """What one who goes back now gets."""
    with open(find_known_good(run).path, "rb") as file:
        return file.read()


@pytest.mark.parametrize("name", ["epoch_2.pt", "ckpt.pt"])
def test_a_good_one_has_bytes_that_saving_over_it_does_not_reach(root, run, name):
    """The script saves over its file in place, one pass after it was called good. Who may read it stays the same."""
    save(root / name, 1)
    (root / name).chmod(0o600)
    first = (root / name).read_bytes()
    reconcile(look(run), PassNotes())
    assert set(how_kept(run).values()) <= {"copy", "reflink"}
    with open(root / name, "wb") as file:
        file.write(b"cut off")
    [id] = list_kept(run)
    kept = at(root, f"_ckptguard/{read_kept(run, id).checkpoint_key}")
    assert (kept.read_bytes(), kept.stat().st_mode & 0o777) == (first, 0o600)


def test_a_copy_that_is_called_off_is_no_trouble(root, run):
    """Training needs the processor, or the daemon ends: the link stays, nobody is told, and the next pass does it."""
    save(root / "epoch_2.pt", 1)
    reconcile(look(run, QUICK.changed(keep="link")), PassNotes())
    stop = threading.Event()
    stop.set()
    assert copy_independently(look(run), Work(stop=stop), saved_over=False) == []
    assert set(how_kept(run).values()) <= {"link", "reflink"}
    assert copy_independently(look(run), PLAIN, saved_over=False) == []
    assert set(how_kept(run).values()) <= {"copy", "reflink"}


def test_a_full_disk_leaves_the_link_and_says_so(root, run, monkeypatch):
    """There is room for the next save, and none for bytes of its own: the link stays, a sentence says what is lacking,
    and later it has them."""
    save(root / "epoch_2.pt", 1)
    room = SPARE + int(1.2 * (root / "epoch_2.pt").stat().st_size)
    with monkeypatch.context() as full:
        full.setattr(local_storage.LocalStorage, "free_space", lambda self: room)
        done = reconcile(look(run), PassNotes())
    assert [c.outcome.value for c in done.checked] == ["good"]
    if how_kept(run) == {"2.1": "reflink"}:
        pytest.skip("this file system has reflinks")
    assert how_kept(run) == {"2.1": "link"}
    assert done.room.problem == "not enough room: no copy, only a hard link"
    assert not done.could_not_tell
    reconcile(look(run), PassNotes())
    assert how_kept(run) == {"2.1": "copy"}


def test_a_disk_that_fills_up_meanwhile_leaves_the_link(root, run, monkeypatch):
    """The first byte had room, the last one has not."""

    def full(self, data):
        raise StorageFullError("no space left", key="")

    save(root / "epoch_2.pt", 1)
    with monkeypatch.context() as faulty:
        faulty.setattr(local_storage.LocalUpload, "write", full)
        reconcile(look(run), PassNotes())
    assert how_kept(run)["2.1"] in ("link", "reflink")
    assert known_bytes(run) == (root / "epoch_2.pt").read_bytes()


@pytest.mark.parametrize("what", ["{}", "{}.json", "{}/epoch_3.pt", ""])
def test_of_a_copy_that_goes_while_it_is_copied_nothing_is_said(root, run, monkeypatch, what):
    """Somebody removes it, a part of it, or all records. The older one gets bytes of its own, if it is there. If the
    run stays, the next pass makes another copy."""
    for step in (2, 3):
        save(root / f"epoch_{step}.pt", step)
        reconcile(look(run, QUICK.changed(keep="link", keep_good=2)), PassNotes())
    if "reflink" in how_kept(run).values():
        pytest.skip("this file system has reflinks")
    goes = at(root, f"_ckptguard/{what}".format(read_kept(run, max(list_kept(run), key=lambda id: id.order)).folder))
    write = local_storage.LocalUpload.write

    def removes(self, data):
        shutil.rmtree(goes) if goes.is_dir() else goes.unlink(missing_ok=True)
        write(self, data)

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(local_storage.LocalUpload, "write", removes)
        assert copy_independently(look(run), PLAIN, saved_over=False) == []
    if what:
        assert how_kept(run)["2.1"] == "copy"
        assert reconcile(look(run, QUICK.changed(keep_good=2)), PassNotes()).could_not_tell == ()
        assert how_kept(run) == {"2.1": "copy", "3.1": "copy"}
        assert known_bytes(run) == (root / "epoch_3.pt").read_bytes()


def test_large_ones_are_behind_by_an_hour_at_most_until_one_is_saved_over(root, run):
    """Only the first of three has bytes of its own; the first sign of saving over in place has the newest copied."""
    rare = QUICK.changed(copy_limit=0, keep_good=3)
    for step in (1, 2, 3):
        save(root / f"epoch_{step}.pt", step)
        reconcile(look(run, rare), PassNotes())
    if "reflink" in how_kept(run).values():
        pytest.skip("this file system has reflinks")
    assert how_kept(run) == {"1.1": "copy", "2.1": "link", "3.1": "link"}
    save(root / "epoch_1.pt", 9)
    reconcile(look(run, rare), PassNotes())
    assert how_kept(run)["3.1"] == "copy"


def test_the_one_with_bytes_of_its_own_stays_beyond_keep_good(root, run):
    """Two newer ones are links: they may die with one write."""
    rare = QUICK.changed(copy_limit=0, keep_good=1)
    for step in (1, 2, 3):
        save(root / f"epoch_{step}.pt", step)
        reconcile(look(run, rare), PassNotes())
    if "reflink" in how_kept(run).values():
        pytest.skip("this file system has reflinks")
    assert how_kept(run) == {"1.1": "copy", "3.1": "link"}


WRITES = ("over", "part", "rename", "unlink", "mv", "cp", "again")


def write(root, names, how, which, seed):
    """One thing that a trainer may do to its files."""
    path, other = root / names[which % len(names)], root / names[(which + 1) % len(names)]
    if how == "over":
        save(path, seed)
    elif how == "part" and path.exists():
        with open(path, "r+b") as file:
            file.truncate(path.stat().st_size // 2)
    elif how == "rename":
        save(root / "tmp-new", seed)
        (root / "tmp-new").replace(path)
    elif how == "unlink":
        path.unlink(missing_ok=True)
    elif how == "mv" and path.exists():
        path.replace(other)
    elif how == "cp" and path.exists():
        other.write_bytes(path.read_bytes())
    elif how == "again":
        path.unlink(missing_ok=True)
        save(path, seed)


@settings(max_examples=25, deadline=None)
@given(
    names=st.sampled_from([("ckpt.pt",), ("epoch_1.pt", "epoch_2.pt"), ("last.pt", "net-5.pt", "net-10.pt")]),
    actions=st.lists(st.tuples(st.sampled_from((*WRITES, "pass")), st.integers(0, 2)), min_size=1, max_size=12),
    keep_good=st.integers(1, 2),
)
def test_no_sequence_of_writes_takes_the_last_good_one(tmp_path_factory, names, actions, keep_good):
    """After each pass that called one good, whatever is written: every kept good one of the newest of each series is
    there byte for byte, as it was judged."""
    place = tmp_path_factory.mktemp("run")
    root = place / "run"
    root.mkdir()
    run, notes, good = open_run(str(root)), PassNotes(), {}
    for number, (how, which) in enumerate([("over", 0), ("pass", 0), *actions]):
        if how == "pass":
            before = {p.name: p.read_bytes() for p in root.iterdir() if p.is_file()}
            done = reconcile(look(run, QUICK.changed(keep_good=keep_good)), notes, assume_quiet=True)
            for one in done.checked:
                if one.outcome.value == "good" and one.id not in good and one.path in before:
                    good[one.id] = before[one.path]
        else:
            write(root, names, how, which, number)
        for series in {id.series for id in good}:
            newest = max((id for id in good if id.series == series), key=lambda id: id.order)
            copy = read_kept(run, newest)
            assert copy is not None, (newest, how)
            assert at(root, f"_ckptguard/{copy.checkpoint_key}").read_bytes() == good[newest], (newest, how)
    shutil.rmtree(place)


def test_a_save_that_was_rotated_away_is_judged_by_its_copy(root, run):
    """Settle is longer than it lives: it is known-good from its copy, under its own id and times."""
    slow, notes = QUICK.changed(settle=60.0), PassNotes()
    for step in (1, 2, 3):
        save(root / f"epoch_{step}.pt", step)
        saved = (root / f"epoch_{step}.pt").read_bytes()
        reconcile(look(run, slow), notes)
        (root / f"epoch_{step}.pt").unlink()
    done = reconcile(look(run, slow), notes)
    assert [(str(c.id), c.outcome.value) for c in done.checked] == [("3.1", "good")]
    assert done.lost is None
    answer = find_known_good(run)
    assert (str(answer.id), answer.kept) == ("3.1", True)
    assert known_bytes(run) == saved


def test_a_copy_that_made_way_is_judged_by_the_next_pass(root, run):
    """Other runs go first, and nothing changes meanwhile. The copy still waits for its verdict."""
    slow, notes = QUICK.changed(settle=60.0), PassNotes()
    save(root / "epoch_1.pt", 1)
    reconcile(look(run, slow), notes)
    (root / "epoch_1.pt").unlink()
    assert reconcile(look(run, slow), notes, work=Work(may_begin=lambda size: False)).yielded
    assert [str(one.id) for one in reconcile(look(run, slow), notes).checked] == ["1.1"]


def test_one_name_saved_over_every_second_has_known_good_ones(root, run):
    """nanoGPT's way: each content is judged from its copy once the next one lies there; they count up in order."""
    slow, notes, checked, saved = QUICK.changed(settle=60.0), PassNotes(), [], []
    for number in range(1, 7):
        save(root / "ckpt.pt", number)
        saved.append((root / "ckpt.pt").read_bytes())
        checked += reconcile(look(run, slow), notes).checked
    assert [(str(c.id), c.outcome.value) for c in checked] == [(f"-.{n}", "good") for n in range(2, 6)]
    assert at(root, f"_ckptguard/{read_kept(run, checked[-1].id).checkpoint_key}").read_bytes() == saved[4]


def test_a_trainer_that_keeps_one_save_and_saves_every_second(root, run):
    """Hugging Face's, with save_total_limit=1: each save is rotated away before it is quiet."""
    slow, notes, checked = QUICK.changed(settle=60.0), PassNotes(), []
    for step in range(100, 700, 100):
        folder = root / f"checkpoint-{step}"
        folder.mkdir()
        save(folder / "pytorch_model.bin", step)
        (folder / "config.json").write_text("{}")
        checked += reconcile(look(run, slow), notes).checked  # in the middle of a save
        (folder / "trainer_state.json").write_text(f'{{"global_step": {step}, "log_history": []}}')
        if step > 100:
            shutil.rmtree(root / f"checkpoint-{step - 100}")
        checked += reconcile(look(run, slow), notes).checked
    assert [(str(c.id), c.outcome.value) for c in checked] == [(f"{n}.1", "good") for n in range(100, 600, 100)]
    answer = find_known_good(run)
    assert (str(answer.id), answer.kept) == ("500.1", True)


def test_what_does_not_prove_to_be_whole_is_not_judged_by_its_copy(root, run, monkeypatch):
    """A folder may gain a file until it is quiet: its copy says nothing. One sentence says what to do, once, and only
    when training has gone on since."""
    monkeypatch.setattr("ckptguard.upkeep.reconcile._GOING", 0.0)
    slow, notes, told = QUICK.changed(settle=60.0), PassNotes(), []
    for step in (1, 2, 3):
        (root / f"step-{step}").mkdir()
        save(root / f"step-{step}" / "model.pt", step)
        told.append(reconcile(look(run, slow), notes).lost)
        shutil.rmtree(root / f"step-{step}")
        done = reconcile(look(run, slow), notes)
        assert (done.checked, done.lost) == ((), None)
    assert told[0] is None
    assert "step-1 was gone before it could be verified" in told[1]
    assert told[2] is None


def test_a_save_that_grows_keeps_its_id(root, run):
    """What was copied first lies there still: it is the same save."""
    slow, notes = QUICK.changed(settle=60.0), PassNotes()
    (root / "step-1").mkdir()
    save(root / "step-1/model.pt", 1)
    reconcile(look(run, slow), notes)
    save(root / "step-1/optimizer.pt", 2)
    done = reconcile(look(run, slow), notes, assume_quiet=True)
    assert [(str(c.id), c.outcome.value) for c in done.checked] == [("1.1", "good")]
    [id] = list_kept(run)
    assert read_kept(run, id).files == ("step-1/model.pt", "step-1/optimizer.pt")


def test_a_copy_of_damage_is_nothing_of_its_own(root, run):
    """What lies there has other times and is damage: its copy goes, and is not judged as a save later."""
    save(root / "net-1.pt", 1)
    notes, before = PassNotes(), (root / "net-1.pt").read_bytes()
    reconcile(look(run), notes)
    with open(root / "net-1.pt", "r+b") as file:
        file.seek(len(before) // 2)
        file.write(bytes([before[len(before) // 2] ^ 1]))
    assert [c.outcome.value for c in reconcile(look(run), notes).checked] == ["bad"]
    (root / "net-1.pt").unlink()
    assert reconcile(look(run), notes).checked == ()
    assert [str(id) for id in list_kept(run)] == ["1.1"]


def test_status_says_what_saving_over_would_cost(root, run):
    """Bytes of its own; those of an older one; none at all."""
    rare, notes = QUICK.changed(copy_limit=0), PassNotes()
    save(root / "epoch_1.pt", 1)
    reconcile(look(run, QUICK.changed(keep="link")), notes)
    if how_kept(run) == {"1.1": "reflink"}:
        pytest.skip("this file system has reflinks")
    found = status(look(run, QUICK.changed(keep="link")))
    assert (found.protected, "not saving over it" in found.explanation) == (False, True)
    save(root / "epoch_2.pt", 2)
    reconcile(look(run, rare), notes)
    found = status(look(run, rare))
    assert found.protected
    assert found.explanation == "yes: epoch_2.pt is known good and has a full copy"
    assert found.kept_bytes >= (root / "epoch_2.pt").stat().st_size
    save(root / "epoch_3.pt", 3)
    reconcile(look(run, rare), notes)
    found = status(look(run, rare))
    assert (found.protected, found.explanation) == (
        True,
        "yes: epoch_2.pt has an independent copy; the newer epoch_3.pt has none: damage to it would lose 1 save",
    )


class Killed(BaseException):
    """As kill -9 ends a process."""


@pytest.mark.parametrize(
    "names", [("ckpt.pt", "other.pt"), ("epoch_1.pt", "epoch_2.pt"), ("a/ckpt.pt", "b/epoch_7.pt")]
)
def test_the_first_good_one_has_its_bytes_before_anything_else_is_read(root, run, names):
    """Killed at the next file's reading, and saved over in place at once: the first one comes back byte for byte."""
    contents = {}
    for seed, name in enumerate(names):
        (root / name).parent.mkdir(exist_ok=True)
        save(root / name, seed)
        contents[name] = (root / name).read_bytes()
    read = []

    def scanner(storage, keys, options, progress):
        if storage.url == run.storage.url and not options.structure_only:
            if read:
                raise Killed
            read.extend(keys)
        return PLAIN.scanner(storage, keys, options, progress)

    with pytest.raises(Killed):
        reconcile(look(run), PassNotes(), work=Work(scanner=scanner))
    for name in names:
        (root / name).write_bytes(b"cut off")
    assert known_bytes(run) == contents[read[0]]
