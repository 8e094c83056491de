"""Pruning: what the policy does not keep goes to the trash, whole, and nothing else ever does."""

import os
import shutil
import threading
import time
import uuid
from pathlib import Path

import fsspec
import pytest
import torch
from servers.fixtures import AZURE_CONTAINER, GCS_BUCKET, S3_BUCKETS, served
from support.crashes import Killed, kill_at
from support.faults import flip
from support.records_on_disk import at
from support.runs import QUICK, save_file, state_dict, write_safetensors, write_sharded, write_torch
from support.views import entry_name, look

from ckptguard.errors import CkptguardError, CouldNotTellError, NoKnownGoodError, StorageError
from ckptguard.inspect.list_states import survey
from ckptguard.records import who_and_when
from ckptguard.records.pins import pin_checkpoint, release_pin
from ckptguard.records.run import open_run
from ckptguard.records.trash import list_trashed
from ckptguard.recover.restore import restore
from ckptguard.recover.roll_back import GoBack, roll_back
from ckptguard.retention.pin import pin
from ckptguard.retention.prune import prune
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.runs.lock import run_lock
from ckptguard.runs.run_reader import RunMemory
from ckptguard.storage import open_storage
from ckptguard.storage.local.local_storage import LocalStorage
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.ids import CheckpointId, series_of
from ckptguard.values.retention_policy import Policy
from ckptguard.values.verdict import Outcome

DAY = 86400.0
YEAR = 365 * DAY
LAST = Policy(keep_last=2, keep_good=2)


@pytest.fixture
def five(root, run):
    """A run with verified torch files of steps 100 to 500, and without kept copies."""
    for step in range(100, 600, 100):
        write_torch(root, step, seed=step)
    reconcile(look(run, QUICK.changed(keep="none")), PassNotes())
    return run


def in_place(root):
    """The steps whose files lie in the run."""
    return sorted(int(p.stem.partition("-")[2]) for p in root.glob("net-*.pt"))


def removed(pruned):
    """The steps that a prune removed."""
    return [d.checkpoint.id.step for d in pruned.removed]


def test_what_no_rule_keeps_goes_to_the_trash_and_can_be_restored(five, root, tmp_path):
    """Three of five go; the verdicts stay, and what is restored has the bytes that were saved."""
    saved = (root / "net-200.pt").read_bytes()
    assert removed(prune(look(five), LAST, grace=DAY)) == [100, 200, 300]
    assert in_place(root) == [400, 500]
    states = {s.step: s for s in survey(look(five))}
    assert [(s.in_place, s.trashed, s.outcome) for s in states.values()] == [(False, True, Outcome.GOOD)] * 3 + [
        (True, False, Outcome.GOOD)
    ] * 2
    assert find_known_good(five).step == 500
    done = restore(look(five), str(tmp_path / "out"), step=200)
    assert Path(done.path).read_bytes() == saved
    assert removed(prune(look(five), LAST, grace=DAY)) == []
    (root / "net-500.pt").unlink()  # by somebody: what is left is enough to go on from
    assert find_known_good(five).step == 400


def test_a_dry_run_does_nothing(five, root):
    """It decides the same, and leaves every file."""
    before = sorted(p for p in root.rglob("*"))
    planned = prune(look(five), LAST, grace=DAY, dry_run=True)
    assert removed(planned) == [100, 200, 300]
    assert sorted(p for p in root.rglob("*")) == before
    assert prune(look(five), LAST, grace=DAY).decisions == planned.decisions


def test_an_empty_policy_removes_nothing(five, root):
    """Without a rule everything stays."""
    assert removed(prune(look(five), Policy(), grace=DAY)) == []
    assert in_place(root) == [100, 200, 300, 400, 500]


def fail_listing(run, root, monkeypatch):
    """No folder can be listed."""
    monkeypatch.setattr(LocalStorage, "list", lambda *_, **__: (_ for _ in ()).throw(StorageError("EIO", key="")))


def damage(pattern):
    """The last record of this pattern is damaged."""

    def act(run, root, monkeypatch):
        path = sorted((root / "_ckptguard").glob(pattern))[-1]
        path.write_bytes(path.read_bytes()[:-9] + b"00000000\n")

    return act


def fail_pointer(run, root, monkeypatch):
    """A pointer cannot be read."""
    (root / "latest").mkdir()
    (root / "latest" / "x").touch()
    (root / "sub").mkdir()
    (root / "sub" / "latest").write_text("global_step1")
    (root / "sub" / "latest").chmod(0)
    real = LocalStorage.open

    def refuse(self, key):
        if key == "sub/latest":
            raise StorageError("EIO", key=key)
        return real(self, key)

    monkeypatch.setattr(LocalStorage, "open", refuse)


@pytest.mark.parametrize(
    "trouble",
    [fail_listing, damage("ledger/*/*.good.json"), damage("manifests/*/*.json"), fail_pointer],
    ids=["listing", "ledger", "manifest", "pointer"],
)
def test_what_cannot_be_read_removes_nothing_at_all(five, root, monkeypatch, trouble):
    """A failed listing, and any record in question that cannot be read, end the whole prune."""
    with monkeypatch.context() as patched:
        trouble(five, root, patched)
        with pytest.raises(CouldNotTellError):
            prune(look(five), LAST, grace=DAY)
    assert in_place(root) == [100, 200, 300, 400, 500]
    assert list_trashed(five) == []


def test_nothing_goes_while_a_newer_one_is_pending(five, root):
    """A save that nobody verified yet may turn out bad; so may one that was saved again in place."""
    write_torch(root, 600, seed=600)
    assert removed(prune(look(five), LAST, grace=DAY)) == []
    reconcile(look(five, QUICK.changed(keep="none")), PassNotes())
    torch.save(state_dict(7), root / "net-600.pt")
    assert removed(prune(look(five), LAST, grace=DAY)) == []


def test_bad_ones_take_no_slot_and_go_only_when_asked(five, root):
    """Two slots are filled by good ones around a bad one; it goes once enough newer ones are good."""
    state = state_dict(6)
    state["embed.weight"][0, 0] = float("nan")
    torch.save(state, root / "net-600.pt")
    write_torch(root, 700, seed=700)
    reconcile(look(five, QUICK.changed(keep="none")), PassNotes())
    assert removed(prune(look(five), LAST, grace=DAY)) == [100, 200, 300, 400]
    assert in_place(root) == [500, 600, 700]
    write_torch(root, 800, seed=800)
    reconcile(look(five, QUICK.changed(keep="none")), PassNotes())
    assert removed(prune(look(five), LAST, grace=DAY, dry_run=True)) == [500]
    failed = Policy(keep_last=2, drop_failed=True)
    assert removed(prune(look(five), failed, grace=DAY)) == [500, 600]


def test_a_copied_run_is_pruned_once_it_was_verified_where_it_is(five, root, tmp_path):
    """Copying gives files other times, so the verdicts may be on other files; reading them again settles it, once."""
    shutil.copytree(root, tmp_path / "copied", copy_function=shutil.copy)
    run = open_run(str(tmp_path / "copied"))
    assert removed(prune(look(run), LAST, grace=DAY)) == []
    for times in (1, 2):
        reconcile(look(run, QUICK.changed(keep="none")), PassNotes())
        assert len(list((tmp_path / "copied/_ckptguard/ledger").rglob("*.good.json"))) == 10
        assert not reconcile(look(run, QUICK.changed(keep="none")), PassNotes()).checked, times
    assert removed(prune(look(run), LAST, grace=DAY)) == [100, 200, 300]


def test_what_is_pinned_or_referred_to_stays(five, root):
    """Pins, links, and pointers such as ``latest`` hold a checkpoint, and the reason says so."""
    pin = pin_checkpoint(five, CheckpointId(series_of("net-100.pt"), 100, 1), note="the paper's")
    (root / "best.pt").symlink_to("net-200.pt")
    (root / "latest").write_text("net-300.pt\n")
    done = prune(look(five), Policy(keep_last=1, keep_good=1), grace=DAY)
    assert removed(done) == [400]
    why = {d.checkpoint.id.step: d.reasons for d in done.decisions}
    assert why[100] == ("pinned: the paper's",)
    assert why[200] == ("best.pt refers to it",)
    assert why[300] == ("latest refers to it",)
    release_pin(five, pin)
    assert removed(prune(look(five), Policy(keep_last=1, keep_good=1), grace=DAY)) == [100]


def test_the_best_model_of_a_trainer_stays(root, run):
    """Hugging Face's Trainer loads its best model at the end, by the newest trainer_state.json."""
    for step in (100, 200, 300, 400):
        folder = root / f"checkpoint-{step}"
        folder.mkdir()
        torch.save(state_dict(step), folder / "pytorch_model.bin")
        best = f'"/elsewhere/out/checkpoint-{min(step, 200)}"'
        (folder / "trainer_state.json").write_text(f'{{"global_step": {step}, "best_model_checkpoint": {best}}}')
    reconcile(look(run, QUICK.changed(keep="none")), PassNotes())
    done = prune(look(run), Policy(keep_last=1, keep_good=1), grace=DAY)
    assert removed(done) == [100, 300]
    assert [d.reasons for d in done.decisions if d.checkpoint.id.step == 200] == [
        ("checkpoint-400/trainer_state.json refers to it",)
    ]


def test_the_decision_is_that_of_the_moment_of_removal(five, root, monkeypatch):
    """What comes into use after the look, or what vanishes meanwhile of the good ones, stops the removal."""
    from ckptguard.retention import prune as module

    decide = module.decide

    def decide_and_pin(*args, **kwargs):
        found = decide(*args, **kwargs)
        if not pins:
            pins.append(pin_checkpoint(five, CheckpointId(series_of("net-100.pt"), 100, 1), reason="in use"))
            (root / "net-500.pt").unlink()
        return found

    pins = []
    monkeypatch.setattr("ckptguard.retention.prune.decide", decide_and_pin)
    done = prune(look(five), LAST, grace=DAY)
    assert removed(done) == []
    assert done.could_not_tell == ("net-200.pt was not removed: newer good ones changed meanwhile",)
    assert in_place(root) == [100, 200, 300, 400]


def test_the_trash_is_emptied_after_its_time_of_grace(five, root, monkeypatch):
    """Not before, and by the machine's own clock: the wall clock may say what it likes."""
    prune(look(five), LAST, grace=DAY)
    for off in (YEAR, -YEAR, 0.0):
        with monkeypatch.context() as patched:
            patched.setattr(who_and_when.time, "time", lambda off=off: time.time_ns() / 1e9 + off)
            assert prune(look(five), LAST, grace=DAY).emptied == ()
    uptime = who_and_when._uptime()
    monkeypatch.setattr(who_and_when, "_uptime", lambda: uptime + DAY + 60)
    assert [m.step for m in prune(look(five), LAST, grace=DAY).emptied] == [100, 200, 300]
    assert list_trashed(five) == []
    assert not list((root / "_ckptguard" / "trash").rglob("*net-[0-9]*"))
    assert {s.step: s.outcome for s in survey(look(five))}[100] is Outcome.GOOD  # the history stays


def test_the_trash_keeps_what_is_good_again_among_the_newest(five, root):
    """Where newer ones turned out bad, the trash is not emptied of what may be needed, nor of what is pinned."""
    prune(look(five), Policy(keep_last=1, keep_good=1), grace=DAY)
    flip(root / "net-500.pt", new_times=True)
    reconcile(look(five, QUICK.changed(keep="none")), watch_again(five))
    pin_checkpoint(five, CheckpointId(series_of("net-200.pt"), 200, 1))
    done = prune(look(five), Policy(keep_last=1, keep_good=1), grace=0.0)
    assert sorted(m.step for m in done.emptied) == [100, 300]
    assert sorted(m.step for m in done.in_trash) == [200, 400]


def test_where_nothing_else_is_good_the_trash_is_named(five, root, tmp_path):
    """Newer ones that are damaged: whoever asks is told how to have what was removed back."""
    prune(look(five), LAST, grace=DAY)
    for step in (400, 500):
        (root / f"net-{step}.pt").unlink()
    for ask in (
        lambda: find_known_good(five),
        lambda: restore(look(five), str(tmp_path / "out")),
        lambda: roll_back(look(five), GoBack(reason="sick", check_writing=False)),
    ):
        with pytest.raises(NoKnownGoodError) as caught:
            ask()
        assert f"restore {root} --step 300" in caught.value.hint
    with pytest.raises(NoKnownGoodError) as caught:
        find_known_good(five, before_step=100)
    assert "verify" in caught.value.hint


def watch_again(run):
    """Have everything verified again."""
    from ckptguard.verification.checkpoint import verify_checkpoint

    for checkpoint in look(run).checkpoints:
        verify_checkpoint(look(run), checkpoint)
    return PassNotes()


def test_a_wrong_clock_removes_nothing_early(five, root, monkeypatch):
    """Within an hour, all of them were saved just now, whatever this machine's clock says; and if the newest were
    saved by a clock a year ahead, the others did not grow old."""
    for off in (YEAR, -YEAR):
        monkeypatch.setattr(who_and_when.time, "time", lambda off=off: time.time_ns() / 1e9 + off)
        assert removed(prune(look(five), Policy(keep_within=3600.0, keep_good=1), grace=DAY)) == []
        monkeypatch.setattr("ckptguard.verification.seal.utc_now", lambda off=off: iso(time.time_ns() / 1e9 + off))
        write_torch(root, 600 if off > 0 else 700, seed=int(off))
        reconcile(look(five, QUICK.changed(keep="none")), PassNotes())
        assert removed(prune(look(five), Policy(keep_within=3600.0, keep_good=1), grace=DAY)) == []


def iso(seconds):
    """A time as records write it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def test_two_prunes_at_once_remove_nothing_twice(five, root):
    """Each checkpoint is removed by one of them."""
    found = []
    start = threading.Barrier(4)

    def work():
        run = open_run(str(root))
        start.wait()
        found.extend(removed(prune(look(run), LAST, grace=DAY)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [100, 200, 300]
    assert in_place(root) == [400, 500]


def test_a_run_that_is_held_is_left_alone(five, root, monkeypatch):
    """Whoever moves files of the run holds its lock; nothing is decided without it."""
    monkeypatch.setattr("ckptguard.retention.prune.run_lock", lambda run: run_lock(run, timeout=0.0))
    with run_lock(five), pytest.raises(CkptguardError, match="another process"):
        prune(look(five), LAST, grace=DAY)
    assert in_place(root) == [100, 200, 300, 400, 500]


def test_a_daemon_prunes_by_the_settings_after_its_verdicts(five, root):
    """Once a rule is set, each pass that verified something leaves what the rules keep, and says what went."""
    settings = QUICK.changed(keep="none", keep_last=3)
    write_torch(root, 600, seed=600)
    done = reconcile(look(five, settings), PassNotes())
    assert done.pruned == ("net-100.pt", "net-200.pt", "net-300.pt")
    assert done.could_not_tell == ()
    assert in_place(root) == [400, 500, 600]
    damage("manifests/*/*.json")(five, root, None)
    done = reconcile(look(five, settings.changed(keep_last=1)), PassNotes())
    assert done.pruned == ()
    assert [t for t in done.could_not_tell if t.startswith("nothing was pruned: ")]
    assert in_place(root) == [400, 500, 600]


@pytest.mark.parametrize("record", ["verdict", "manifest"])
def test_what_is_remembered_of_a_record_that_rots_removes_nothing(five, root, record):
    """The newest good ones are why others may go: that they are good is read again, whatever an earlier look read."""
    memory = RunMemory()
    everything = Policy(keep_last=5, keep_good=2)
    assert removed(prune(look(five, memory=memory), everything, grace=DAY)) == []
    for id in (CheckpointId("net-#.pt", step, 1) for step in (400, 500)):
        place = {
            "verdict": f"ledger/net-#.pt/{entry_name(id.step, 1, 1, Outcome.GOOD)}",
            "manifest": f"manifests/{id.record_path}.json",
        }[record]
        at(root, f"_ckptguard/{place}").write_bytes(b"rotten")
    with pytest.raises(CouldNotTellError):
        prune(look(five, memory=memory), LAST, grace=DAY)
    assert in_place(root) == [100, 200, 300, 400, 500]


def test_records_on_another_disk_take_a_mark_for_trash(root, tmp_path, monkeypatch):
    """Where no rename reaches, the files stay in place for the time of grace; then only they go, and their folder."""
    for step in (100, 200, 300):
        write_sharded(root, step, seed=step)
    (root / "sharded-200" / "link").symlink_to("config.json")
    run = open_run(str(root), QUICK.changed(records=str(tmp_path / "records")))
    reconcile(look(run, QUICK.changed(keep="none")), PassNotes())
    monkeypatch.setattr("ckptguard.retention.trash.moves_files", lambda run: False)
    assert removed(prune(look(run), Policy(keep_last=1, keep_good=1), grace=DAY)) == [100, 200]
    (root / "sharded-100" / "notes.txt").write_text("mine")
    assert [s.in_place and s.trashed for s in survey(look(run))] == [True, True, False]
    assert len(prune(look(run), Policy(keep_last=1, keep_good=1), grace=0.0).emptied) == 2
    assert sorted(p.name for p in root.iterdir()) == ["sharded-100", "sharded-300"]
    assert [p.name for p in (root / "sharded-100").iterdir()] == ["notes.txt"]
    assert list_trashed(run) == []


def test_a_newer_save_keeps_the_files_that_it_did_not_write_again(root, tmp_path, monkeypatch):
    """A trainer, or an upload that leaves equal files alone: what it left belongs to the newer save, too."""
    for step in (100, 200, 300):
        write_safetensors(root, step, seed=step)
    run = open_run(str(root), QUICK.changed(records=str(tmp_path / "records")))
    reconcile(look(run, QUICK.changed(keep="none")), PassNotes())
    monkeypatch.setattr("ckptguard.retention.trash.moves_files", lambda run: False)
    one = Policy(keep_last=1, keep_good=1)
    assert removed(prune(look(run), one, grace=DAY)) == [100, 200]
    (root / "model-100/model.safetensors").unlink()
    save_file(state_dict(7), root / "model-100/model.safetensors")
    reconcile(look(run, QUICK.changed(keep="none")), PassNotes())
    newer = next(c for c in look(run).checkpoints if c.step == 100)
    pin(look(run), newer)
    assert len(prune(look(run), one, grace=0.0).emptied) == 2
    assert sorted(p.name for p in root.iterdir()) == ["model-100", "model-300"]
    assert str(restore(look(run), str(tmp_path / "out"), step=100).id) == "100.2"


@pytest.fixture
def remote(tmp_path):
    """The same five on a file system that is not local."""
    url = f"memory://prune-{uuid.uuid4().hex}"
    memory = fsspec.filesystem("memory")
    for step in range(100, 600, 100):
        write_torch(tmp_path / "made", step, seed=step)
        memory.pipe_file(
            f"{url.removeprefix('memory:/')}/net-{step}.pt", (tmp_path / f"made/net-{step}.pt").read_bytes()
        )
    run = open_run(url)
    reconcile(look(run, QUICK.changed(keep="none")), PassNotes(), assume_quiet=True)
    return run


def test_elsewhere_the_trash_is_a_mark(remote, monkeypatch, tmp_path):
    """No byte is copied: files stay in place, count no more, can be restored, and are removed after the grace."""

    def steps():
        return sorted(int(e.key[4:-3]) for e in remote.storage.list("") if e.key.endswith(".pt"))

    assert removed(prune(look(remote), LAST, grace=DAY)) == [100, 200, 300]
    assert steps() == [100, 200, 300, 400, 500]
    again = prune(look(remote), LAST, grace=DAY)
    assert (removed(again), [d.checkpoint.id.step for d in again.decisions]) == ([], [400, 500])
    assert restore(look(remote), str(tmp_path / "out"), step=200).step == 200
    uptime = who_and_when._uptime()
    monkeypatch.setattr(who_and_when, "_uptime", lambda: uptime + DAY + 60)
    store = fsspec.filesystem("memory").store
    before = dict(store)
    for number in range(1, 100):
        store.clear()
        store.update(before)
        try:
            with kill_at(number):
                assert len(prune(look(remote), LAST, grace=DAY).emptied) == 3
            break
        except Killed:
            assert {400, 500} <= set(steps())
        # A daemon's look goes on with what was begun, finds nothing damaged, and ends it.
        assert not [c for c in reconcile(look(remote), PassNotes()).checked if c.outcome is not Outcome.GOOD]
        assert (steps(), list_trashed(remote)) == ([400, 500], [])
    assert number > 10
    assert (steps(), list_trashed(remote)) == ([400, 500], [])


def test_elsewhere_too_two_at_once_remove_nothing_twice(remote):
    """Without a lock, whoever writes the mark first removes; emptying the trash twice is emptying it once."""
    found, emptied = [], []
    start = threading.Barrier(4)

    def work(grace, answers):
        run = open_run(remote.url)
        start.wait()
        answers.append(prune(look(run), LAST, grace=grace))

    for grace, answers in ((DAY, found), (0.0, emptied)):
        threads = [threading.Thread(target=work, args=(grace, answers)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [done.could_not_tell for done in answers] == [()] * 4
    assert sorted(step for done in found for step in removed(done)) == [100, 200, 300]
    assert {m.step for done in emptied for m in done.emptied} == {100, 200, 300}
    assert sorted(e.key for e in remote.storage.list("") if e.key.endswith(".pt")) == ["net-400.pt", "net-500.pt"]


NEWEST = Policy(keep_last=1, keep_good=1)


SERVERS = (
    ["moto", "ceph", "sftp", "azure", "gcs"] if os.environ.get("CKPTGUARD_CAMPAIGN") == "full" else ["ceph", "sftp"]
)


@pytest.fixture(params=SERVERS)
def url(request, tmp_path):
    """A new place on a server."""
    server = request.getfixturevalue(request.param)
    name = f"prune-{uuid.uuid4().hex[:8]}"
    if request.param == "sftp":
        return f"sftp://127.0.0.1:{server.port}{tmp_path}/{name}"
    bucket = {
        "moto": f"s3://{S3_BUCKETS[0]}",
        "ceph": f"s3://{S3_BUCKETS[1]}",
        "azure": f"abfs://{AZURE_CONTAINER}",
        "gcs": f"gs://{GCS_BUCKET}",
    }[request.param]
    return f"{bucket}/{name}"


@pytest.mark.campaign
def test_what_is_not_kept_goes_after_its_time_of_grace(url, tmp_path):
    """Marked, still restorable, then gone with its folder; what is kept is verified all the time."""
    made = tmp_path / "made"
    made.mkdir()
    storage = open_storage(url, must_exist=False, options=served().storage)
    for step in (100, 200):
        folder = made / write_sharded(made, step, seed=step)
        for file in folder.iterdir():
            storage.create(f"{folder.name}/{file.name}", file.read_bytes())
    run = open_run(url, served())
    done = reconcile(look(run), PassNotes(), assume_quiet=True)
    assert [c.outcome for c in done.checked] == [Outcome.GOOD] * 2
    assert not reconcile(look(run), PassNotes(), assume_quiet=True).checked
    pruned = prune(look(run), NEWEST, grace=86400.0)
    assert (pruned.could_not_tell, [d.checkpoint.id.step for d in pruned.removed]) == ((), [100])
    assert [m.how for m in pruned.in_trash] == ["marked"]
    assert restore(look(run), str(tmp_path / "out"), step=100).outcome is Outcome.GOOD
    emptied = prune(look(run), NEWEST, grace=0.0)
    assert (emptied.could_not_tell, [m.step for m in emptied.emptied]) == ((), [100])
    left = {e.key.split("/")[0] for e in run.storage.list("", recursive=True)}
    assert left == {"sharded-200", "_ckptguard"}
    assert {e.key for e in run.storage.list("") if e.kind == "folder"} == {"sharded-200", "_ckptguard"}
    assert list_trashed(run) == []
    assert find_known_good(run).step == 200
