"""A prune or a repair that is killed before any step of it, or of which any operation fails, loses nothing, and the
next one finishes it."""

import io
import itertools
import os
import re
import shutil

import pytest
import torch
from support.crashes import Killed, fail_at, kill_at
from support.faults import flip
from support.kept_runs import guarded
from support.layouts import write_dcp, write_lightning, write_trainer, write_zero2
from support.records_on_disk import at, files_of
from support.runs import QUICK, state_dict, write_sharded, write_torch
from support.views import look

from ckptguard.errors import CkptguardError, CouldNotTellError, StorageError
from ckptguard.records.kept import read_kept
from ckptguard.records.run import open_run
from ckptguard.records.trash import list_trashed
from ckptguard.recover.restore import restore
from ckptguard.repair.repair import repair
from ckptguard.repair.scrub import scrub
from ckptguard.retention.prune import prune
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.runs.history import load_history
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.upkeep.thin import thin_too
from ckptguard.values.ids import CheckpointId
from ckptguard.values.retention_policy import Policy
from ckptguard.values.verdict import Outcome
from ckptguard.verification.target import verify_target

FULL = os.environ.get("CKPTGUARD_CAMPAIGN") == "full"
NONE, COPY = QUICK.changed(keep="none"), QUICK.changed(keep="copy")
GOES, STAYS = (1, 2), (3, 4)


def write_pair(root, step, seed):
    """A checkpoint of two files side by side, which move one by one."""
    torch.save(state_dict(seed), root / f"epoch_{step}.pt")
    (root / f"epoch_{step}.yaml").write_text(f"epoch: {step}\nstep: {step * 10}\n")


def in_place(root, *steps):
    """The bytes of these checkpoints."""
    found = {key: data for key, data in files_of(root).items() if not key.startswith("_ckptguard")}
    return {key: data for key, data in found.items() if int(re.search(r"\A[a-z]+[-_](\d+)", key)[1]) in steps}


class Prune:
    """Two of four checkpoints go: to the trash, or for good."""

    stride, failing_stride = 1, 9
    copy = staticmethod(os.link)  # a copy of its own would be read first
    says = CouldNotTellError

    def __init__(self, writer, grace):
        self.writer, self.grace = writer, grace

    def begin(self, root):
        for step in GOES + STAYS:
            self.writer(root, step, seed=step)
        reconcile(look(open_run(str(root)), NONE), PassNotes())
        self.saved = {step: in_place(root, step) for step in GOES + STAYS}

    def act(self, run):
        return prune(look(run), Policy(keep_last=2, keep_good=2), grace=self.grace)

    def after(self, root):
        """What stays is not touched."""
        assert [in_place(root, step) for step in STAYS] == [self.saved[step] for step in STAYS]
        assert find_known_good(open_run(str(root))).id.step == 4
        return True

    def look(self, root):
        """A look finishes or undoes what was begun, and finds nothing damaged."""
        run = open_run(str(root))
        assert all(one.outcome is Outcome.GOOD for one in reconcile(look(run, NONE), PassNotes()).checked)
        for step in GOES:
            assert in_place(root, step) in ({}, self.saved[step])
            if self.grace:
                self.comes_back(run, step)

    def again(self, run, *, failed):
        assert self.act(run).could_not_tell == ()

    def end(self, root):
        """What goes is whole in the trash, or gone, and nothing is left behind."""
        run, left = open_run(str(root)), GOES if self.grace else ()
        assert in_place(root, *GOES) == {}
        assert sorted(id.step for id in list_trashed(run)) == [*left]
        folders = [path for path in (root / "_ckptguard/trash").glob("*/*") if path.is_dir()]
        assert sorted(path.name for path in folders) == [f"{step:012d}.1" for step in left]
        for step in left:
            self.comes_back(run, step)

    def comes_back(self, run, step):
        """Restored, it is whole."""
        out = at(run.url, "").with_name("out")
        restore(look(run), str(out), step=step)
        assert files_of(out) == self.saved[step]
        shutil.rmtree(out)


class Thin:
    """Two of four lose what only a resume needs: one file of several ranks after the other. Some are written `anew`."""

    stride, failing_stride = 1 if FULL else 2, 23
    copy = staticmethod(os.link)
    says = CouldNotTellError

    def __init__(self, writer, *goes, anew=()):
        self.writer, self.names, self.anew = writer, (*goes, *anew), anew

    def begin(self, root):
        self.paths = {step: self.writer(root, step, step) for step in GOES + STAYS}
        reconcile(look(open_run(str(root)), NONE), PassNotes())
        self.saved = self.files(root)

    def act(self, run):
        done = prune(look(run, NONE), Policy(thin_after=2), grace=86400.0)
        return thin_too(look(run, NONE), done)

    def after(self, root):
        """What stays is not touched, and a whole one is known-good. What goes is in place, or in the trash."""
        assert find_known_good(open_run(str(root))).id.step == 4
        now, trash = (
            self.files(root),
            [path.read_bytes() for path in (root / "_ckptguard/trash").rglob("*") if path.is_file()],
        )
        for name, data in self.saved.items():
            assert now.get(name) == data or (self.goes(name) and data in trash)
            assert name in now or not name.endswith(self.anew)
        return now != self.saved

    def look(self, root):
        """A verification without a pass, then a pass: neither finds anything damaged, and both lead to a whole one."""
        assert verify_target(str(root), NONE).outcome is Outcome.GOOD
        run = open_run(str(root))
        assert all(one.outcome is Outcome.GOOD for one in reconcile(look(run, NONE), PassNotes()).checked)
        assert find_known_good(run).id.step == 4

    def again(self, run, *, failed):
        assert self.act(run).could_not_tell == ()

    def end(self, root):
        """What goes is whole in the trash, with what stays, and all that is in place is good."""
        run, now = open_run(str(root)), self.files(root)
        left = {name: data for name, data in self.saved.items() if not self.goes(name)}
        anew = {name: data for name, data in now.items() if self.goes(name) and name.endswith(self.anew)}
        assert now == {**left, **anew}
        for name, data in anew.items():
            assert len(data) < len(self.saved[name])
            assert self.of_weights(data) == self.of_weights(self.saved[name])
        assert sorted(id.step for id in list_trashed(run)) == [*GOES]
        assert verify_target(str(root), NONE).outcome is Outcome.GOOD
        for step in GOES:
            out = at(run.url, "").with_name("out")
            restore(look(run), str(out), step=step)
            assert files_of(out) == {n: d for n, d in self.saved.items() if n.startswith(self.paths[step])}
            shutil.rmtree(out)

    def of_weights(self, data):
        """The weights in a file, None if it is no archive."""
        if not data.startswith(b"PK") or b"data.pkl" not in data[:100]:
            return None
        state = torch.load(io.BytesIO(data), weights_only=True)
        return (
            {name: tensor.tolist() for name, tensor in state["state_dict"].items()} if "state_dict" in state else None
        )

    def goes(self, name):
        last = name.rpartition("/")[2]
        return last.endswith(self.names) and any(name.startswith(self.paths[step]) for step in GOES)

    def files(self, root):
        """The bytes of the files of checkpoints, by path."""
        return {key: data for key, data in files_of(root).items() if key.startswith(tuple(self.paths.values()))}


class Repair:
    """There is damage in place, and in a kept copy."""

    stride, failing_stride = 1 if FULL else 3, 31
    copy = staticmethod(shutil.copy2)
    says = CkptguardError

    def __init__(self, writer, *harmed):
        self.writer, self.hit = writer, harmed

    def begin(self, root):
        run = guarded(root, writer=self.writer)
        self.whole = self.files(root)
        for name in self.hit:
            flip(at(root, name))
        scrub(look(run))
        self.harmed = self.files(root)

    def act(self, run):
        return repair(look(run, COPY))

    def after(self, root):
        """Each name holds the right bytes, the damaged ones, or nothing, never anything else; whether one is free."""
        now = self.files(root)
        for name in self.whole:
            assert now.get(name) in (self.whole[name], self.harmed[name], None)
        staged = [name for name in now if "tmp-repair" in name]
        missing = self.whole.keys() - now
        assert all(any(s.endswith(n) for s in staged) for n in missing if not n.startswith("_ckptguard"))
        assert str(find_known_good(open_run(str(root))).id) in ("100.1", "200.1")
        return missing or staged

    def look(self, root):
        """A name that is free is taken by the next look, although nobody asked it to repair."""
        reconcile(look(open_run(str(root)), COPY), PassNotes())
        assert self.files(root).keys() == self.whole.keys()
        assert not list(root.rglob("*tmp-repair*"))

    def again(self, run, *, failed):
        self.act(run)
        if failed and load_history(run).verdict(CheckpointId("sharded-#", 200, 1)).outcome is not Outcome.GOOD:
            repair(look(run, COPY), "sharded-200")  # all of its bytes are right, and nobody could verify that

    def end(self, root):
        """All is right again: bytes, verdicts, copies, and nothing is left behind."""
        run = open_run(str(root))
        assert self.files(root) == self.whole
        assert not list(root.rglob("*tmp-repair*"))
        history = load_history(run)
        for series in history.names:
            for id, current_verdict in history.current_verdicts(series).items():
                assert current_verdict.outcome is Outcome.GOOD
                assert read_kept(run, id) is not None
        assert str(find_known_good(run).id) == "200.1"

    def files(self, root):
        """The bytes of every checkpoint file and of every kept one."""
        ends = (".safetensors", ".pt", "model.safetensors.index.json")
        return {name: data for name, data in files_of(root).items() if "quarantine" not in name and name.endswith(ends)}


KEPT, SHARDS = "_ckptguard/kept", [f"sharded-200/model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
CASES = {
    "prune pairs to the trash": Prune(write_pair, 86400.0),
    "prune pairs for good": Prune(write_pair, 0.0),
    "prune folders to the trash": Prune(write_sharded, 86400.0),
    "prune folders for good": Prune(write_sharded, 0.0),
    "thin folders": Thin(write_trainer, "optimizer.pt", "scheduler.pt"),
    "thin the files of ranks": Thin(write_zero2, "optim_states.pt"),
    "thin a file": Thin(write_lightning, anew=(".ckpt",)),
    "thin a folder of pieces": Thin(write_dcp, "_4.distcp", "_5.distcp", "_6.distcp", anew=(".metadata",)),
    "repair a folder": Repair(write_sharded, *SHARDS[:2], f"{KEPT}/sharded-#/000000000200.1/{SHARDS[2]}"),
    "repair a file": Repair(write_torch, "net-200.pt", f"{KEPT}/net-#.pt/000000000100.1/net-100.pt"),
}


@pytest.fixture
def root(tmp_path):
    """An empty run's folder."""
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def copies(case, root, numbers):
    """(number, a copy of the run), one after the other, each in a place where this process has seen nothing go."""
    for number in numbers:
        copy = root.with_name(f"run-{number}")
        shutil.copytree(root, copy, copy_function=case.copy)
        yield number, copy
        shutil.rmtree(copy)


@pytest.mark.campaign
@pytest.mark.timeout(1200 if FULL else 300)
@pytest.mark.parametrize("looks", [False, True], ids=["finished at once", "finished after a look"])
@pytest.mark.parametrize("name", CASES)
def test_killed_at_any_step_nothing_is_lost(root, name, looks):
    """Killed before step 1, 2, ... until it passes untouched (of a repair here some; CKPTGUARD_CAMPAIGN takes all)."""
    case, half_done = CASES[name], []
    case.begin(root)
    for number, copy in copies(case, root, itertools.count(1, case.stride)):
        run = open_run(str(copy))
        try:
            with kill_at(number):
                case.act(run)
            break
        except Killed:
            half_done.append(case.after(copy))
        if looks:
            case.look(copy)
        case.again(run, failed=False)
        case.end(copy)
    case.end(copy)
    assert len(half_done) * case.stride >= 8
    assert any(half_done)


@pytest.mark.campaign
@pytest.mark.timeout(3600 if FULL else 300)
@pytest.mark.parametrize("for_ever", [False, True], ids=["once", "for ever"])
@pytest.mark.parametrize(
    "name", ["prune pairs to the trash", "thin the files of ranks", "thin a file", "repair a folder"]
)
def test_whatever_operation_fails_nothing_is_lost(root, name, for_ever):
    """The n-th operation on storage fails, for every n until it passes untouched (here for some n; CKPTGUARD_CAMPAIGN
    looks at all): it is said, and the next one ends where an untouched one ends."""
    case, failed, passed = CASES[name], 0, 0
    stride = 1 if FULL else case.failing_stride
    case.begin(root)
    for number, copy in copies(case, root, itertools.count(1 + stride // 3 * for_ever, stride)):
        run = open_run(str(copy))
        with fail_at(number, StorageError("input/output error", key="x"), for_ever=for_ever):
            try:
                told = bool(case.act(run).could_not_tell)
            except case.says:
                told = True
        failed, passed = failed + told, 0 if told else passed + 1
        case.after(copy)
        case.again(run, failed=True)
        case.end(copy)
        if passed >= 3:
            break
    assert failed * stride >= 50
