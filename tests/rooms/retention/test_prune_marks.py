"""Pruning where files cannot be moved by rename: on an object store, or with the records on another disk."""

import threading
import uuid

import fsspec
import pytest
from support.crashes import Killed, kill_at
from support.runs import QUICK, save_file, state_dict, write_safetensors, write_sharded, write_torch
from support.views import look

from ckptguard.inspect.list_states import survey
from ckptguard.records import who_and_when
from ckptguard.records.run import open_run
from ckptguard.records.trash import list_trashed
from ckptguard.recover.restore import restore
from ckptguard.retention.pin import pin
from ckptguard.retention.prune import prune
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.retention_policy import Policy
from ckptguard.values.verdict import Outcome

DAY = 86400.0
LAST = Policy(keep_last=2, keep_good=2)


def removed(pruned):
    """The steps that a prune removed."""
    return [d.checkpoint.id.step for d in pruned.removed]


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
