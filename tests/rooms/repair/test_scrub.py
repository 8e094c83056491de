"""A scrub finds rot in place and in kept copies, says nothing else, and goes on where it was stopped."""

import random
import shutil

import pytest
from support import damage
from support.faults import flip
from support.kept_runs import guarded, told
from support.records_on_disk import at
from support.runs import QUICK, write_sharded, write_torch
from support.views import look

from ckptguard.records.incidents import list_incidents
from ckptguard.records.kept import read_kept, read_set_aside
from ckptguard.records.run import open_run
from ckptguard.records.scrubs import read_scrubs
from ckptguard.repair.scrub import ScrubListener, ScrubOrder, scrub
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.runs.history import load_history
from ckptguard.runs.work import Work
from ckptguard.scan.reread import ReadingStopped
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.ids import CheckpointId
from ckptguard.values.verdict import Outcome

ID_200 = CheckpointId("sharded-#", 200, 1)


def test_all_is_read_and_a_good_one_changes_nothing(root):
    """In place and kept copies; the ledger is as it was, and when they were read is on record, once."""
    run = guarded(root)
    before = load_history(run).names
    for _ in range(2):
        done = scrub(look(run))
        assert sorted(told(done)) == [(id, place, "good") for id in ("100.1", "200.1") for place in ("kept", "place")]
        assert (done.left, done.stopped, done.could_not_tell) == (0, False, ())
    assert load_history(run).names == before
    assert sorted((s.id.step, s.place, s.done, s.files) for s in read_scrubs(run)) == [
        (step, place, 4, 4) for step in (100, 200) for place in ("kept", "place")
    ]
    assert list_incidents(run) == []


KINDS = ["span_flip", "envelope_flip", "zeroed_page", "truncation", "appended_bytes", "missing_shard", "empty_shard"]


@pytest.mark.parametrize("kind", [*KINDS, "broken_header", "broken_index", "swapped_files"])
def test_damage_in_place_is_bad_at_once(root, kind):
    """The verdict names the file, and the tensor where one was hit; an incident is open and hooks are told, once."""
    run = guarded(root)
    manifest = load_history(run).manifest(ID_200)
    hit = damage.KINDS[kind](root, manifest, random.Random(4))
    damage.set_times(root, manifest, "kept")
    events = []
    done = scrub(look(run), watcher=ScrubListener(tell=lambda run, event: events.append(event)))
    [bad] = [one for one in done.places if one.outcome is Outcome.BAD]
    assert (str(bad.id), bad.place) == ("200.1", "place")
    assert hit.file in {f.file for f in bad.findings}
    named = {f.tensor for f in bad.findings}
    assert all(named & set(group) for group in hit.tensors)
    assert load_history(run).verdict(ID_200).outcome is Outcome.BAD
    [incident] = list_incidents(run)
    assert (incident.cause, incident.state, incident.evidence["checkpoint"]) == ("damage", "open", "200.1")
    assert [event["step"] for event in events] == [200]
    scrub(look(run), watcher=ScrubListener(tell=lambda run, event: events.append(event)))
    assert (len(list_incidents(run)), len(events)) == (1, 1)
    assert find_known_good(run).kept


def test_files_added_and_rotation_are_no_alarm(root):
    """An extra file, and a checkpoint that the trainer deleted with its copy; what was on record of it goes."""
    run = guarded(root)
    scrub(look(run))
    (root / "sharded-200" / "eval.txt").write_text("0.5")
    shutil.rmtree(root / "sharded-100")
    shutil.rmtree(at(root, "_ckptguard/kept/sharded-#/000000000100.1"))
    at(root, "_ckptguard/kept/sharded-#/000000000100.1.json").unlink()
    done = scrub(look(run))
    assert sorted(told(done)) == [("200.1", "kept", "good"), ("200.1", "place", "good")]
    assert {s.id.step for s in read_scrubs(run)} == {200}
    assert list_incidents(run) == []


def test_a_damaged_kept_copy_counts_no_more(root):
    """The checkpoint stays good; the ledger, an incident and a hook tell of its copy, which is no known-good."""
    run = guarded(root)
    copy = read_kept(run, ID_200)
    [file] = at(root, f"_ckptguard/{copy.folder}").rglob("*model-00002*")
    flip(file)
    events = []
    done = scrub(look(run), watcher=ScrubListener(tell=lambda run, event: events.append(event)))
    assert [one for one in told(done) if one[2] != "good"] == [("200.1", "kept", "bad")]
    verdict = load_history(run).verdict(ID_200)
    assert verdict.outcome is Outcome.GOOD
    [finding] = [f for f in verdict.findings if f.check == "kept"]
    assert finding.file == "sharded-200/model-00002-of-00003.safetensors"
    assert finding.tensor is not None
    assert (read_kept(run, ID_200), read_set_aside(run, ID_200)) == (None, copy)
    assert [i.evidence["kept_copy"] for i in list_incidents(run)] == ["200.1"]
    assert [event["event"] for event in events] == ["incident"]
    shutil.rmtree(root / "sharded-200")
    assert str(find_known_good(run).id) == "100.1"


def test_the_last_copy_of_all_turns_bad(root):
    """Rotated away, and then its kept copy rots: no whole copy is left, and the verdict says so."""
    run = guarded(root)
    shutil.rmtree(root / "sharded-200")
    copy = read_kept(run, ID_200)
    flip(next(at(root, f"_ckptguard/{copy.folder}").rglob("*model-00002*")))
    assert str(find_known_good(run).id) == "200.1"  # nobody has looked yet
    assert ("200.1", "kept", "bad") in told(scrub(look(run)))
    verdict = load_history(run).verdict(ID_200)
    assert (verdict.outcome, verdict.place_damaged, verdict.content) == (Outcome.BAD, True, Outcome.GOOD)
    assert str(find_known_good(run).id) == "100.1"


def test_links_are_read_once(root):
    """A kept copy that is nothing but links to what lies in place has no bytes of its own to rot."""
    run = guarded(root, keep="link")
    assert read_kept(run, ID_200).how in ("link", "reflink")
    read = told(scrub(look(run)))
    assert [one for one in read if one[1] == "place"] == [("100.1", "place", "good"), ("200.1", "place", "good")]
    if read_kept(run, ID_200).how == "link":
        assert len(read) == 2


def test_the_oldest_comes_first_and_the_young_are_left_out(root):
    """By the records of scrubs, else by the verdict; one from the future says nothing."""
    run = guarded(root, keep="none", writer=write_torch, steps=(100, 200, 300))
    scrub(look(run))
    folder = at(root, "_ckptguard/scrubs/net-#.pt")
    for step, began in ((200, "20240101T000000Z"), (300, "20990101T000000Z")):
        [record] = folder.glob(f"*{step}.1.place.*")
        record.rename(folder / f"{step:012}.1.place.{began}.1-1.json")
    assert told(scrub(look(run), ScrubOrder(max_age=86400.0))) == [
        ("200.1", "place", "good")
    ]  # 300 has its verdict's time
    for name in ("000000000300.1.place.20240101T000000Z.1-1.json", "000000000100.1.place.20230101T000000Z.1-1.json"):
        for old in folder.glob(name[:22] + "*"):
            old.unlink()
        (folder / name).write_text("{}")
    assert [str(one.id) for one in scrub(look(run)).places] == ["100.1", "300.1", "200.1"]


class StopAfter:
    """Stops the reading before the n-th block."""

    def __init__(self, blocks):
        self.left = blocks

    def __call__(self):
        self.left -= 1
        if self.left < 0:
            raise ReadingStopped


def test_stopped_anywhere_it_goes_on_there(root):
    """Stopped before each block in turn, in the middle of a checkpoint: no verdict, nothing lost, no file is read
    twice, and all is read in the end."""
    run = guarded(root, keep="none", steps=(100,))
    before = load_history(run).names
    rounds, read = 0, []
    while True:
        rounds += 1
        # One block to begin with the checkpoint, one for a file: each of these is smaller than a block.
        done = scrub(look(run), hold=StopAfter(2), work=Work(progress=read.append))
        if not done.stopped:
            break
        assert (done.left, done.places) == (1, ())
        assert load_history(run).names == before
    assert told(done) == [("100.1", "place", "good")]
    assert rounds == 4
    assert sum(read) == sum(p.stat().st_size for p in (root / "sharded-100").iterdir())
    [record] = read_scrubs(run)
    assert record.is_whole


def test_time_that_is_up_stops_it(root):
    """Nothing is read in no time, and what is left is counted."""
    run = guarded(root)
    done = scrub(look(run), ScrubOrder(max_duration=0.0))
    assert (done.places, done.left, done.stopped) == ((), 4, True)
    assert str(done.next.id) == "100.1"


def test_damage_is_told_although_time_is_up(root):
    """What was found before the stop is not lost by it."""
    run = guarded(root, keep="none", steps=(100,))
    flip(root / "sharded-100" / "model-00001-of-00003.safetensors")
    done = scrub(look(run), hold=StopAfter(3))
    assert told(done) == [("100.1", "place", "bad")]


def test_what_differs_only_once_is_no_damage(root, monkeypatch):
    """A bad read that is not there the second time: the verdict stays, and a sentence tells of it."""
    import ckptguard.repair.scrub as module

    run = guarded(root, writer=write_torch, steps=(100,))
    real, lies = module.reread, {"net-100.pt"}

    def reread(storage, key, sealed, *args, **kwargs):
        if key in lies or (key.startswith("kept/") and lies and lies.pop()):
            lies.discard(key)
            return module.WrongFile(file=sealed.path, message="no", tensors=())
        return real(storage, key, sealed, *args, **kwargs)

    monkeypatch.setattr(module, "reread", reread)
    done = scrub(look(run))
    assert {one[2] for one in told(done)} == {"good"}
    assert done.could_not_tell
    assert list_incidents(run) == []
    assert load_history(run).verdict(CheckpointId("net-#.pt", 100, 1)).outcome is Outcome.GOOD


def test_hostile_names_among_the_records_say_nothing(root):
    """Whatever lies in the folder of scrubs: it is passed over."""
    run = guarded(root, keep="none", writer=write_torch, steps=(100,))
    folder = at(root, "_ckptguard/scrubs/net-#.pt")
    folder.mkdir(parents=True)
    for name in (
        "x",
        "000000000100.1.place.99999999T999999Z.1-1.json",
        "000000000100.1.place.20240231T000000Z.1-1.json",
        "100.1.place.20300101T000000Z.1-1.json",
        "000000000100.1.place.20240101T000000Z.99999999999-1.json",
        "000000000100.0.place.20240101T000000Z.1-1.json",
        "000000000100.1.Place.20240101T000000Z.1-1.json",
        "000000000100.1.place.00010101T000000Z.1-1.json",
        "000000000100.1.place.20240101T000000Z.7-1.json",
    ):
        (folder / name).write_text("{}")
    (folder / "000000000100.1.place.20250101T000000Z.0-1.json").write_text("")
    assert told(scrub(look(run))) == [("100.1", "place", "good")]


def test_a_damaged_manifest_is_no_verdict(root):
    """It cannot be told what the bytes should be."""
    run = guarded(root, keep="none", writer=write_torch, steps=(100, 200))
    [manifest] = root.glob("_ckptguard/manifests/*/*100.1.json")
    manifest.write_bytes(manifest.read_bytes()[:-30])
    before = load_history(run).names
    done = scrub(look(run))
    assert told(done) == [("200.1", "place", "good")]
    assert len(done.could_not_tell) == 1
    assert load_history(run).names == before


def test_a_save_in_progress_is_left_alone(root):
    """A checkpoint that is being saved again gets no verdict from a scrub."""
    run = guarded(root, keep="none")
    (root / "sharded-200" / "model-00001-of-00003.safetensors").write_bytes(b"")
    before = load_history(run).names
    done = scrub(look(run, QUICK.changed(settle=60.0)))
    assert told(done) == []
    assert load_history(run).names == before


def test_on_an_object_store(tmp_path):
    """The same on memory://, without a local file."""
    import fsspec

    root = tmp_path / "local"
    root.mkdir()
    write_sharded(root, 100, seed=100)
    store = fsspec.filesystem("memory")
    store.rm("/scrubbed", recursive=True) if store.exists("/scrubbed") else None
    store.put(str(root), "/scrubbed", recursive=True)
    run = open_run("memory://scrubbed")
    reconcile(look(run, QUICK.changed(keep="copy")), PassNotes(), assume_quiet=True)
    assert told(scrub(look(run))) == [("100.1", "kept", "good"), ("100.1", "place", "good")]
    key = "/scrubbed/sharded-100/model-00003-of-00003.safetensors"
    data = bytearray(store.cat_file(key))
    data[-3] ^= 1
    store.pipe_file(key, bytes(data))
    assert ("100.1", "place", "bad") in told(scrub(look(run)))


def test_every_beginning_has_its_end(root):
    """Also that of a place that went meanwhile, about which there is nothing to tell."""
    run, begun, ended = guarded(root), [], []

    def begin(due):
        begun.append(due.where)
        if due.place == "place":
            shutil.rmtree(root / due.path)

    done = scrub(look(run), watcher=ScrubListener(begin=begin, end=ended.append))
    assert len(ended) == len(begun) == 4
    assert [one for one in ended if one is not None] == list(done.places)
    assert ended.count(None) == 2
