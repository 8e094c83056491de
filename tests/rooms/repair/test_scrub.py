"""A scrub finds rot in place and in kept copies, says nothing else, and goes on where it was stopped."""

import hashlib
import json
import math
import random
import shutil
import time
from pathlib import Path
from unittest import mock

import pytest
import safetensors.torch
import torch
from ckptguard_daemon.metrics import exposition
from support import damage
from support.counting_storage import counted
from support.faults import flip
from support.kept_runs import guarded, told
from support.records_on_disk import at
from support.runs import QUICK, write_sharded, write_torch
from support.tiny_run import inline
from support.views import look

from ckptguard.inspect.status import status
from ckptguard.records.after_seal import late_md5_ids, read_late_md5s
from ckptguard.records.incidents import list_incidents
from ckptguard.records.kept import read_kept, read_set_aside
from ckptguard.records.run import Run, open_run
from ckptguard.records.scrubs import read_scrubs
from ckptguard.repair import scrub as scrub_module
from ckptguard.repair.repair import repair
from ckptguard.repair.scrub import ScrubListener, ScrubOrder, scrub
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.runs.history import load_history
from ckptguard.runs.run_view import RunView
from ckptguard.runs.work import Work
from ckptguard.scan.reread import ReadingStopped
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.ids import CheckpointId
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome
from ckptguard.verification import checkpoint as checkpoint_module

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


SETTINGS = Settings(settle=0.0, scan_interval=1.0, keep="copy", keep_good=2)


def good_run(root, count):
    """A run of so many good checkpoints, the newest two of which have kept copies; it counts what it is asked."""
    write_torch(root, 1, seed=1)
    for step in range(2, count + 1):
        shutil.copyfile(root / "net-1.pt", root / f"net-{step}.pt")
    reconcile(RunView(open_run(str(root)), SETTINGS), PassNotes(), assume_quiet=True)
    return counted(open_run(str(root)))


def cost_of_one(root, count):
    """Requests to read one place again, a minute later, among so many checkpoints. Within the second in which it was
    read before, its record has the name of the one before, and nothing is removed."""
    run, requests = good_run(root, count)
    every = scrub(RunView(run, SETTINGS))
    assert len(every.places) == count + 2
    others = {(one.id, one.place) for one in every.places[1:]}
    requests.clear()
    later = time.time() + 60.0
    with mock.patch("time.time", return_value=later):
        assert len(scrub(RunView(run, SETTINGS), ScrubOrder(leave_out=others)).places) == 1
    assert requests["run.list"] == 1
    return requests.total()


def test_a_place_costs_the_same_among_many(tmp_path):
    """Of 40 no more than of 10."""
    assert cost_of_one(tmp_path / "many", 40) <= cost_of_one(tmp_path / "few", 10)


def test_what_is_damaged_is_found_and_repaired_without_another_listing(tmp_path):
    """The run is listed once by the scrub that finds it. The repair looks once more for what a killed one left."""
    run, requests = good_run(tmp_path / "run", 20)
    flip(tmp_path / "run" / "net-20.pt", -9000)
    requests.clear()
    found = scrub(RunView(run, SETTINGS))
    assert [str(one.id) for one in found.places if one.outcome.value == "bad"] == ["20.1"]
    assert requests["run.list"] == 1
    requests.clear()
    assert [file.repaired for file in repair(RunView(run, SETTINGS)).files] == [True]
    assert requests["run.list"] == 2


LATE = ScrubOrder(max_age=math.inf, late_md5s=True)  # what a daemon reads where its scrub is off
SIZES = (64, 700, 70_000, 1_100_000)  # numbers in a tensor; the last take more than one block


def write(run: Path, step: int, chance: random.Random, sizes: tuple[int, ...] = (700, 70_000)) -> Path:
    """One save of some format, with tensors of these sizes."""
    state = {f"layer{n}.weight": torch.randn(size) for n, size in enumerate(sizes)}
    kind = chance.choice(("torch", "safetensors", "sharded"))
    if kind == "torch":
        torch.save({"model": state, "step": step}, run / f"net-{step}.pt")
        return run / f"net-{step}.pt"
    if kind == "safetensors":
        safetensors.torch.save_file(state, run / f"flat-{step}.safetensors")
        return run / f"flat-{step}.safetensors"
    folder = run / f"sharded-{step}"
    folder.mkdir()
    shards = {name: f"model-{n + 1:05d}-of-{len(state):05d}.safetensors" for n, name in enumerate(state)}
    for name, shard in shards.items():
        safetensors.torch.save_file({name: state[name]}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    return folder


def md5s_of(run: Path, save: Path) -> dict[str, str]:
    """What hashlib says of the files of a save, by path in the run."""
    found = sorted(save.rglob("*")) if save.is_dir() else [save]
    return {str(p.relative_to(run)): hashlib.md5(p.read_bytes()).hexdigest() for p in found}


def counts(run: Run, settings: Settings) -> tuple[int, float]:
    """How many are without, by `status` and by the metric."""
    summary = status(look(run, settings)).summary
    [line] = [
        line
        for line in exposition([summary], None, time.time()).decode().splitlines()
        if line.startswith("ckptguard_without_md5_checkpoints")
    ]
    return summary.without_md5, float(line.split()[-1])


def verified(root: Path, settings: Settings) -> Run:
    """The run after a pass beside training, which leaves out MD5 of what is large: here of everything."""
    run = open_run(str(root))
    reconcile(look(run, settings), PassNotes(), work=Work(scanner=inline, yield_for=0.0), assume_quiet=True)
    return run


@pytest.fixture
def all_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny ones count as large."""
    monkeypatch.setattr(checkpoint_module, "LARGE", 0)


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.usefixtures("all_is_large")
def test_each_good_save_gets_the_right_one_once(root: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its format and size, wherever the reading is stopped and begun by a new process, and whatever is damaged
    or goes away meanwhile. What is damaged is BAD, and gets none."""
    chance = random.Random(seed)
    root.mkdir(exist_ok=True)
    settings = QUICK.changed(keep="none")
    sizes = tuple(chance.choice(SIZES) for _ in range(chance.randint(1, 3)))
    saves = [write(root, step, chance, sizes) for step in range(1, chance.randint(3, 6))]
    expected = {save.name: md5s_of(root, save) for save in saves}
    run = verified(root, settings)
    assert counts(run, settings) == (len(saves), len(saves))

    damaged = {save.name for save in saves if chance.random() < 0.25}
    for save in saves:
        if save.name in damaged:
            flip(chance.choice(sorted(save.rglob("*.safetensors"))) if save.is_dir() else save, -9)
    goes = chance.choice(saves) if chance.random() < 0.5 else None

    taken: list[str] = []
    order: list[str] = []
    real = scrub_module.record_late_md5s

    def record(run: Run, id: object, md5s: dict[str, str]) -> None:
        taken.extend(md5s)
        real(run, id, md5s)

    monkeypatch.setattr(scrub_module, "record_late_md5s", record)
    for _ in range(200):
        left = chance.randint(6, 30)

        def hold() -> None:
            nonlocal left
            left -= 1
            if goes is not None and left == 3 and goes.exists():
                shutil.rmtree(goes) if goes.is_dir() else goes.unlink()
            if left <= 0:
                raise ReadingStopped

        done = scrub(look(run, settings), LATE, hold=hold, work=Work(scanner=inline))
        order += [one.path for one in done.places if one.outcome is Outcome.GOOD]
        bad = {Path(one.path).name for one in done.places if one.outcome is Outcome.BAD}
        assert bad <= damaged
        without = status(look(run, settings)).summary.without_md5
        assert counts(run, settings) == (without, without)
        if not done.left:
            break
    else:
        raise AssertionError("it never ends")

    current_verdict = {save.name for save in saves if save.exists()}
    recorded = {name: found for id in late_md5_ids(run) for name, found in read_late_md5s(run, id).items()}
    for save in saves:
        right, own = expected[save.name], {k: v for k, v in recorded.items() if k in expected[save.name]}
        if save.name in damaged:
            assert own == {}
            bad_now = {s.path for s in look(run, settings).checkpoints} & set(status(look(run, settings)).bad)
            assert save.name not in current_verdict or save.name in bad_now
        elif save.name in current_verdict:
            assert own == right
        else:
            assert own in ({}, right)
    assert len(taken) == len(set(taken))
    assert counts(run, settings) == (0, 0)
    steps = [int(path.removesuffix(".pt").removesuffix(".safetensors").rpartition("-")[2]) for path in order]
    assert steps == sorted(steps)
    assert scrub(look(run, settings), LATE, work=Work(scanner=inline)).places == ()


@pytest.mark.usefixtures("all_is_large")
def test_the_kept_copy_gives_it_where_the_place_is_damaged(root: Path) -> None:
    """The content that was sealed is good, and a whole copy of it is there."""
    root.mkdir(exist_ok=True)
    settings, chance = QUICK.changed(keep="copy"), random.Random(1)
    save = write(root, 1, chance)
    right = md5s_of(root, save)
    run = verified(root, settings)
    flip(next(iter(sorted(save.rglob("*.safetensors")))) if save.is_dir() else save, -9)
    first = scrub(look(run, settings), LATE, work=Work(scanner=inline))
    assert [one.outcome for one in first.places] == [Outcome.BAD]
    assert counts(run, settings) == (1, 1)
    scrub(look(run, settings), LATE, work=Work(scanner=inline))
    [id] = late_md5_ids(run)
    assert read_late_md5s(run, id) == right
    assert counts(run, settings) == (0, 0)


@pytest.mark.parametrize("digest", ["auto", "md5", "blake3"])
@pytest.mark.usefixtures("all_is_large")
def test_the_reading_of_a_scrub_takes_it_unless_the_user_chose_blake3(root: Path, digest: str) -> None:
    """A plain scrub reads all. With `blake3` none is due, and none waits."""
    root.mkdir(exist_ok=True)
    settings = QUICK.changed(keep="none", digest=digest)
    for step in (1, 2):
        write(root, step, random.Random(step))
    run = verified(root, settings)
    waiting = 2 if digest == "auto" else 0
    assert counts(run, settings) == (waiting, waiting)
    scrub(look(run, settings), work=Work(scanner=inline))
    assert len(late_md5_ids(run)) == waiting
    assert counts(run, settings) == (0, 0)
