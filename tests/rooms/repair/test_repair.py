"""A repair puts the right bytes back where they are wrong, and nowhere else, and says what it could not."""

import os
import random
import shutil

import pytest
from support import damage
from support.faults import flip
from support.kept_runs import (
    ID_200,
    KEPT,
    SECOND,
    THIRD,
    contents,
    guarded,
    in_quarantine,
    kept,
    leftovers,
    outcomes,
    told,
)
from support.layouts import WRITERS
from support.records_on_disk import at
from support.runs import QUICK, write_sharded, write_torch
from support.views import look

from ckptguard.errors import BusyError, NotFoundError
from ckptguard.keep.copies import trim_kept
from ckptguard.records.incidents import list_incidents
from ckptguard.records.kept import read_kept, read_set_aside
from ckptguard.records.run import open_run
from ckptguard.repair import one_place
from ckptguard.repair.repair import repair
from ckptguard.repair.scrub import scrub
from ckptguard.replicas.replicate import replicate
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.runs.history import load_history
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.ids import CheckpointId
from ckptguard.values.verdict import Outcome
from ckptguard.verification.target import verify_target

ID_100 = CheckpointId("sharded-#", 100, 1)


def inodes(root):
    """The inode of every file of the second checkpoint."""
    return {p.name: p.stat().st_ino for p in (root / "sharded-200").iterdir()}


KINDS = ["span_flip", "envelope_flip", "zeroed_page", "truncation", "appended_bytes", "missing_shard", "broken_header"]


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_was_damaged_is_replaced(root, kind):
    """Byte for byte as it was sealed; the other files are the same ones; what was damaged lies in quarantine; finding
    and repairing are in the ledger, and the incident is closed."""
    run = guarded(root)
    whole = contents(root)
    before = inodes(root)
    manifest = load_history(run).manifest(ID_200)
    hit = damage.KINDS[kind](root, manifest, random.Random(7))
    damage.set_times(root, manifest, "kept")
    harmed = contents(root).get(hit.file)
    scrub(look(run))
    [planned] = repair(look(run), dry_run=True).files
    assert (planned.file, planned.repaired, planned.source) == (hit.file, False, "kept copy")
    assert contents(root).get(hit.file) == harmed
    done = repair(look(run))
    [file] = done.files
    assert (file.file, file.repaired, file.source, str(file.id)) == (hit.file, True, "kept copy", "200.1")
    assert contents(root) == whole
    changed = {name for name, inode in inodes(root).items() if before[name] != inode}
    assert changed <= {hit.file.rpartition("/")[2]}  # the number of a deleted file may be used again
    assert in_quarantine(root) == ([] if harmed is None else [harmed])
    assert outcomes(run) == ["good", "bad", "good"]
    assert [f.file for f in load_history(run).verdict(ID_200).findings if f.check == "repair"] == [hit.file]
    [incident] = list_incidents(run)
    assert (incident.state, incident.actions) == ("closed", ("restored the right bytes from the kept copy",))
    known = find_known_good(run)
    assert (str(known.id), known.kept) == ("200.1", False)
    assert leftovers(root) == []
    # A link to the new file would be no copy: each has bytes of its own.
    assert (root / hit.file).stat().st_ino != at(root, KEPT + hit.file).stat().st_ino
    assert repair(look(run)).files == ()
    assert not [
        c
        for c in reconcile(look(run, QUICK.changed(keep="copy")), PassNotes()).checked
        if c.outcome is not Outcome.GOOD
    ]


def test_a_hard_link_is_no_source(root):
    """It shares the damage; nothing is touched, and the reason is told."""
    run = guarded(root, keep="link")
    if read_kept(run, ID_200).how != "link":
        pytest.skip("this file system makes reflinks")
    with (root / SECOND).open("r+b") as file:
        file.seek(-9, os.SEEK_END)
        file.write(b"\x55\xaa")
    harmed = contents(root)
    [file] = repair(look(run), "200", dry_run=True).files
    assert (file.repaired, file.source, file.reason) == (
        False,
        None,
        "the kept copy is a hard link to the damaged file",
    )
    [file] = repair(look(run), "sharded-200").files
    assert (file.repaired, file.source, file.reason) == (
        False,
        None,
        "the kept copy is a hard link to the damaged file",
    )
    assert contents(root) == harmed
    assert str(find_known_good(run).id) == "100.1"


def test_place_and_copy_help_each_other(root):
    """Damaged in different files, both are whole again."""
    run = guarded(root)
    whole = contents(root)
    flip(root / SECOND)
    flip(at(root, KEPT + THIRD))
    scrub(look(run))
    assert read_set_aside(run, ID_200) is not None
    trim_kept(look(run, QUICK.changed(keep_good=1)))  # which must not throw its whole files away
    done = repair(look(run))
    assert sorted((f.place, f.file, f.repaired, f.source) for f in done.files) == [
        ("kept", THIRD, True, "place"),
        ("place", SECOND, True, "kept copy"),
    ]
    assert contents(root) == whole
    assert kept(root) == whole
    assert read_kept(run, ID_200) is not None
    assert {one[2] for one in told(scrub(look(run)))} == {"good"}
    assert all(i.state == "closed" for i in list_incidents(run))


def test_what_has_no_source_stays_and_is_told(root):
    """The same file is damaged in both: nothing is moved, and what can be repaired beside it is."""
    run = guarded(root)
    whole = contents(root)
    flip(root / SECOND)
    flip(at(root, KEPT + SECOND))
    flip(root / THIRD)
    scrub(look(run))
    done = repair(look(run))
    found = {(f.place, f.file): (f.repaired, f.source, f.reason) for f in done.files}
    assert found["place", THIRD] == (True, "kept copy", "")
    assert found["place", SECOND][:2] == (False, None)
    assert "in the kept copy its bytes differ" in found["place", SECOND][2]
    assert found["kept", SECOND][:2] == (False, None)
    assert contents(root)[THIRD] == whole[THIRD]
    assert contents(root)[SECOND] != whole[SECOND]
    assert load_history(run).verdict(ID_200).outcome is Outcome.BAD
    assert str(find_known_good(run).id) == "100.1"


def test_the_daemon_repairs_copies_by_itself_and_places_if_asked(root):
    """A reconciliation puts a kept copy right from its place; a place only with `repair`."""
    run = guarded(root)
    whole = contents(root)
    flip(root / SECOND)
    flip(at(root, "_ckptguard/kept/sharded-#/000000000100.1/sharded-100/model-00001-of-00003.safetensors"))
    scrub(look(run))
    reconcile(look(run, QUICK.changed(keep="copy")), PassNotes())
    assert read_kept(run, ID_100) is not None
    assert contents(root) != whole
    done = reconcile(look(run, QUICK.changed(keep="copy", repair=True)), PassNotes())
    assert contents(root) == whole
    assert ("200.1", Outcome.GOOD) in {(str(c.id), c.outcome) for c in done.checked}


def test_the_daemon_does_not_read_the_hopeless_over_and_over(root, monkeypatch):
    """What has no source is read by one reconciliation and not by the next ones; what is damaged later is repaired."""
    import ckptguard.repair.one_place as module

    run = guarded(root)
    for place in ("", KEPT):
        flip(at(root, place + SECOND))
    scrub(look(run))
    watch, settings, read = PassNotes(), QUICK.changed(keep="copy", repair=True), []
    real = module.reread
    monkeypatch.setattr(module, "reread", lambda *args, **kwargs: read.append(args[1]) or real(*args, **kwargs))
    reconcile(look(run, settings), watch)
    assert read
    read.clear()
    watch.prune_at = 0.0
    reconcile(look(run, settings), watch)
    assert read == []
    flip(at(root, "_ckptguard/kept/sharded-#/000000000100.1/sharded-100/model-00001-of-00003.safetensors"))
    scrub(look(run))
    watch.prune_at = 0.0
    reconcile(look(run, settings), watch)
    assert read_kept(run, ID_100) is not None


def test_what_never_was_good_is_not_repaired(root):
    """Damage in a poisoned checkpoint: its sealed bytes help nobody."""
    run = guarded(root, steps=(100,))
    manifest = load_history(run).manifest(ID_100)
    shutil.copytree(root / "sharded-100", root / "sharded-200")
    for file in (root / "sharded-200").glob("*.safetensors"):
        data = bytearray(file.read_bytes())
        span = next(f for f in manifest.files if f.path.endswith(file.name)).spans[0]
        data[span.offset : span.offset + span.length] = b"\xff" * span.length
        file.write_bytes(data)
    reconcile(look(run, QUICK.changed(keep="copy")), PassNotes())
    assert load_history(run).verdict(ID_200).outcome is Outcome.BAD
    flip(root / SECOND)
    harmed = contents(root)
    done = repair(look(run), "200.1")
    assert [(f.repaired, f.reason) for f in done.files] == [(False, "the sealed bytes were not good either")]
    assert contents(root) == harmed


def test_what_is_gone_comes_back_only_by_its_name(root):
    """A trainer's rotation is not undone, unless somebody asks."""
    run = guarded(root, writer=write_torch)
    whole = (root / "net-200.pt").read_bytes()
    (root / "net-200.pt").unlink()
    assert repair(look(run)).files == ()
    assert not (root / "net-200.pt").exists()
    [file] = repair(look(run), "net-200.pt").files
    assert file.repaired
    assert (root / "net-200.pt").read_bytes() == whole
    assert str(find_known_good(run).id) == "200.1"
    for word in ("net-999.pt", "999.1", "../x", ""):
        with pytest.raises(NotFoundError):
            repair(look(run), word)


def test_while_it_is_written_it_is_refused(root):
    """A file that was written just now, and a checkpoint that is half saved again."""
    run = guarded(root)
    flip(root / SECOND)
    with pytest.raises(BusyError):
        repair(look(run, QUICK.changed(settle=60.0)), "sharded-200")
    shutil.copy(root / "sharded-100" / "model-00001-of-00003.safetensors", root / "sharded-200" / "x")
    os.replace(root / "sharded-200" / "x", root / "sharded-200" / "model-00001-of-00003.safetensors")
    harmed = contents(root)
    for settle in (60.0, 0.0):
        with pytest.raises(BusyError):
            repair(look(run, QUICK.changed(settle=settle)), "sharded-200")
    assert contents(root) == harmed
    assert outcomes(run) == ["good"]


def test_a_source_that_rots_while_it_is_copied_is_none(root, monkeypatch):
    """What was staged is read back: wrong bytes get no name."""
    run = guarded(root)
    flip(root / SECOND)
    scrub(look(run))
    harmed = contents(root)
    real = one_place.copy_within

    def rotten(run, source, target, path, *, how):
        real(run, source, target, path, how=how)
        flip(root / target.key(path))

    monkeypatch.setattr(one_place, "copy_within", rotten)
    [file] = repair(look(run)).files
    assert not file.repaired
    assert "was not copied correctly" in file.reason
    assert contents(root) == harmed
    assert leftovers(root) == []


@pytest.mark.parametrize("at", ["sharded-200", SECOND])
def test_links_and_folders_in_the_way_are_not_followed(root, tmp_path, at):
    """What lies under the name is moved aside as it is; nothing outside of the run is written."""
    run = guarded(root)
    whole = contents(root)
    elsewhere = tmp_path / "elsewhere"
    shutil.move(root / at, elsewhere)
    (root / at).symlink_to(elsewhere)
    before = contents(tmp_path, "elsewhere") if elsewhere.is_dir() else elsewhere.read_bytes()
    done = repair(look(run), "200.1")
    assert (contents(tmp_path, "elsewhere") if elsewhere.is_dir() else elsewhere.read_bytes()) == before
    if at == SECOND:
        assert [f.repaired for f in done.files] == [True]
        assert contents(root) == whole
        assert not (root / SECOND).is_symlink()
    else:
        assert not any(f.repaired for f in done.files)


def test_a_hostile_mark_of_a_copy_leads_nowhere(root):
    """A mark of a set-aside copy with paths that leave its folder is none."""
    run = guarded(root)
    flip(at(root, KEPT + SECOND))
    scrub(look(run))
    mark = at(root, "_ckptguard/kept/sharded-#/000000000200.1.damaged.json")
    mark.write_bytes(mark.read_bytes().replace(b'"path":"sharded-200"', b'"path":"../../../etc"'))
    assert read_set_aside(run, ID_200) is None
    assert repair(look(run)).files == ()


def test_on_an_object_store(tmp_path):
    """Copies instead of renames, and the same end."""
    import fsspec

    root = tmp_path / "local"
    root.mkdir()
    write_sharded(root, 200, seed=200)
    store = fsspec.filesystem("memory")
    if store.exists("/repaired"):
        store.rm("/repaired", recursive=True)
    store.put(str(root), "/repaired", recursive=True)
    run = open_run("memory://repaired")
    reconcile(look(run, QUICK.changed(keep="copy")), PassNotes(), assume_quiet=True)
    for prefix, file in (("", SECOND), (KEPT, THIRD)):
        data = bytearray(store.cat_file(f"/repaired/{prefix}{file}"))
        data[-3] ^= 1
        store.pipe_file(f"/repaired/{prefix}{file}", bytes(data))
    scrub(look(run))
    done = repair(look(run, QUICK.changed(settle=0.0)))
    assert sorted((f.place, f.repaired) for f in done.files) == [("kept", True), ("place", True)]
    for file, content in contents(root).items():
        assert store.cat_file(f"/repaired/{file}") == content
        assert store.cat_file(f"/repaired/{KEPT}{file}") == content
    assert {one[2] for one in told(scrub(look(run)))} == {"good"}


def test_a_replica_helps_where_no_copy_does(root, tmp_path):
    """The same file is damaged in place and in the kept copy: both come back from the replica, which loses nothing."""
    run = guarded(root)
    whole = contents(root)
    replica = str(tmp_path / "replica")
    settings = QUICK.changed(keep="copy", replicas=(replica,))
    assert replicate(look(run, settings), replica).behind == 0
    for place in ("", KEPT):
        flip(at(root, place + SECOND))
    scrub(look(run))
    [planned, _] = repair(look(run, settings), dry_run=True).files
    assert (planned.repaired, planned.source) == (False, f"replica {replica}")
    done = repair(look(run, settings))
    assert sorted((f.place, f.repaired) for f in done.files) == [("kept", True), ("place", True)]
    assert contents(root) == kept(root) == whole
    flip(root / SECOND)
    flip(at(root, KEPT + SECOND))
    assert {one[2] for one in told(scrub(look(open_run(replica))))} == {"good"}  # a replica is a run like any other
    flip(tmp_path / "replica" / SECOND)
    assert ("200.1", "place", "bad") in told(scrub(look(open_run(replica))))
    found = {(f.place, f.repaired) for f in repair(look(run, settings), "sharded-200").files}
    assert found == {("kept", False), ("place", False)}


@pytest.mark.parametrize("source", ["copy", "replica"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "optimizer.pt", "rng_state.pth", "scheduler.pt"])
def test_what_was_repaired_can_be_damaged_and_repaired_again(root, tmp_path, source, name):
    """Whatever file it is, and wherever its bytes came from: it has the time of its save, so it is no new one."""
    settings = QUICK.changed(keep="copy" if source == "copy" else "none", replicas=(str(tmp_path / "replica"),))
    run = guarded(root, keep=settings.keep, writer=WRITERS["trainer"])
    if source == "replica":
        assert replicate(look(run, settings), *settings.replicas).behind == 0
    whole, path = contents(root, "checkpoint-200"), f"checkpoint-200/{name}"
    for verified in (False, False, True):
        flip(root / path, -20 if len(whole[path]) > 20 else 0)
        if verified:
            assert verify_target(str(root), settings).outcome is Outcome.BAD
        [file] = repair(look(run, settings), "checkpoint-200").files
        assert (file.file, file.repaired) == (path, True)
        assert contents(root, "checkpoint-200") == whole


@pytest.mark.parametrize("moment", ["before the move", "after the move"])
def test_a_save_that_comes_between_wins(root, monkeypatch, moment):
    """The trainer saves the file again while it is repaired: its bytes stay, whichever moment it chose."""
    run = guarded(root)
    flip(root / SECOND)
    scrub(look(run))
    new = b"saved again by the trainer"
    real = one_place._move_aside

    def raced(run, damaged, aside):
        if moment == "before the move":
            (root / "new").write_bytes(new)
            os.replace(root / "new", root / SECOND)
        real(run, damaged, aside)
        (root / SECOND).write_bytes(new)

    monkeypatch.setattr(one_place, "swap_files", lambda *_: False)
    monkeypatch.setattr(one_place, "_move_aside", raced)
    with pytest.raises(BusyError):
        repair(look(run), "sharded-200")
    assert (root / SECOND).read_bytes() == new
    assert outcomes(run)[-1] == "bad"
    assert leftovers(root) == []


def test_a_save_that_comes_before_the_exchange_wins(root, monkeypatch):
    """What is taken out is looked at, and put back if it is not what was damaged."""
    run = guarded(root)
    flip(root / SECOND)
    scrub(look(run))
    new, real = b"saved again by the trainer", one_place.swap_files

    def raced(*where):
        monkeypatch.setattr(one_place, "swap_files", real)
        (root / "new").write_bytes(new)
        os.replace(root / "new", root / SECOND)
        return real(*where)

    monkeypatch.setattr(one_place, "swap_files", raced)
    with pytest.raises(BusyError):
        repair(look(run), "sharded-200")
    assert (root / SECOND).read_bytes() == new
    assert (in_quarantine(root), leftovers(root)) == ([], [])


def test_the_name_is_never_free(root, monkeypatch):
    """Where the file system exchanges two files: before and after the one step that changes the name it is taken."""
    run = guarded(root)
    whole = contents(root)
    flip(root / SECOND)
    harmed = (root / SECOND).read_bytes()
    scrub(look(run))
    seen, real = [], one_place.swap_files

    def watched(*where):
        seen.append((root / SECOND).read_bytes() == harmed)
        swapped = real(*where)
        seen.append(swapped and (root / SECOND).read_bytes() == whole[SECOND])
        return swapped

    (root / "a").write_bytes(b"1")
    (root / "b").write_bytes(b"2")
    can = real(str(root), "a", "b")
    assert ((root / "a").read_bytes(), (root / "b").read_bytes()) == ((b"2", b"1") if can else (b"1", b"2"))
    monkeypatch.setattr(one_place, "swap_files", watched)
    repair(look(run))
    assert contents(root) == whole
    assert in_quarantine(root) == [harmed]
    assert seen == [True, can]
