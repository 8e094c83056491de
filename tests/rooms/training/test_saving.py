"""Saves that go wrong, names that are taken, and what a guard leaves in the run."""

import json
import logging
import os
import shutil

import pytest
import torch
from safetensors.torch import save_file
from support.guards import fill_disk, guard_of, guarded
from support.runs import QUICK
from support.small_disk import BLOCK, SmallDisk
from support.views import look

import ckptguard
from ckptguard.decisions import room
from ckptguard.documents.report_lines import what_now
from ckptguard.errors import CouldNotTellError, NoKnownGoodError, SettingsError, StorageError, StorageFullError
from ckptguard.inspect.list_states import survey
from ckptguard.records.kept import list_kept
from ckptguard.records.run import open_run
from ckptguard.storage.local.local_storage import LocalStorage
from ckptguard.training.saving import destinations
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome
from ckptguard.verification.target import Selection, verify_target
from ckptguard.verification.user_decisions import reseal


@pytest.mark.parametrize("after", [0, 100, 30_000])
def test_a_full_disk_leaves_the_known_good_alone(tmp_path, monkeypatch, after):
    """An explicit save on a full disk raises and says so; no half-file, no temporary, the good one still restores."""
    guard = guard_of(tmp_path / "run")
    guard.save(step=10)
    before = sorted(p.name for p in (tmp_path / "run").iterdir())
    with monkeypatch.context() as patched:
        fill_disk(patched, after=after)
        with pytest.raises(StorageFullError, match="no space left"):
            guard.save(step=20)
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == before
    assert guard.resume() == 10


@pytest.mark.parametrize("free", [0, 4 * BLOCK])
@pytest.mark.parametrize("user_files", [False, True], ids=["own layout", "user's files"])
def test_copies_make_way_for_a_save(tmp_path, monkeypatch, free, user_files):
    """Where only kept copies leave too little room, they go, all but one good save's, and the save does not fail."""
    disk, run = SmallDisk(tmp_path / "run", 1 << 30), tmp_path / "run"
    monkeypatch.setattr(LocalStorage, "free_space", lambda self: disk.free())
    monkeypatch.setattr(room, "SPARE", 0)
    model = torch.nn.Linear(64, 64)
    own = {"save": lambda path, step: save_file(model.state_dict(), path), "load": lambda path: None}
    options = own | {"name": "{step}.safetensors"} if user_files else {}
    with guarded(run, model, **options) as guard:
        for step in (10, 20, 30):
            guard.save(step=step)
        keeping = Settings(settle=0.0, keep="copy", keep_good=3)
        reconcile(look(open_run(str(run)), keeping), PassNotes(), assume_quiet=True)
        copies = list_kept(open_run(str(run)))
        disk.capacity = disk.used() + free
        guard.save(step=40)
    assert len(copies) > len(list_kept(open_run(str(run))))
    disk.capacity = 0
    with guarded(run, model, **options) as guard, pytest.raises(StorageFullError):
        guard.save(step=50)
    with guarded(run, model, **options) as guard:
        assert guard.resume() == 40


def test_the_users_save_that_raises_leaves_no_half_file(tmp_path, caplog):
    """What the user's save had written when it raised is removed, and an explicit save raises that error."""

    def save(path, step):
        with open(path, "wb") as file:
            file.write(b"half")
        raise OSError(28, "No space left on device")

    guard = guard_of(tmp_path / "run", save=save, load=lambda path: None)
    with pytest.raises(OSError, match="No space left"):
        guard.save(step=3)
    assert [p.name for p in (tmp_path / "run").iterdir() if p.name != "_ckptguard"] == []


def test_the_same_step_again_is_a_new_generation(tmp_path):
    """A name is never overwritten: the older content moves to quarantine and keeps its own verdict."""
    model = torch.nn.Linear(4, 4)
    guard = guard_of(tmp_path / "run", model)
    guard.save(step=5)
    assert verify_target(str(tmp_path / "run"), QUICK).outcome is Outcome.GOOD
    with torch.no_grad():
        model.weight.add_(1.0)
    guard.save(step=5)
    verify_target(str(tmp_path / "run"), QUICK)
    states = {str(c.id): (c.outcome, c.in_place) for c in survey(look(str(tmp_path / "run")))}
    assert states == {"5.1": (Outcome.GOOD, False), "5.2": (Outcome.GOOD, True)}


def test_our_layout_is_plain(tmp_path):
    """Model and optimizer are safetensors that load without us, the rest is JSON; nothing is pickled."""
    import safetensors.torch

    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    guard = ckptguard.TrainingGuard(tmp_path / "run", model=model, optimizer=optimizer, daemon="off", settings=QUICK)
    folder = tmp_path / "run" / "step-000000007"
    assert guard.save(step=7) == str(folder)
    assert sorted(p.name for p in folder.iterdir()) == ["model.safetensors", "optimizer.safetensors", "state.json"]
    assert safetensors.torch.load_file(folder / "model.safetensors").keys() == model.state_dict().keys()
    assert "state.0.exp_avg" in safetensors.torch.load_file(folder / "optimizer.safetensors")
    state = json.loads((folder / "state.json").read_text())
    assert (state["ckptguard_state"], state["step"]) == (1, 7)
    (checked,) = verify_target(str(tmp_path / "run"), QUICK).checkpoints
    assert (checked.outcome, checked.digest_origin, checked.layout) == (Outcome.GOOD, "writer", "ckptguard")


def test_a_save_that_was_not_sealed_is_never_good(tmp_path, monkeypatch):
    """Killed between the rename and the manifest: the folder is there, and it is not known-good."""
    guard = guard_of(tmp_path / "run")
    guard.save(step=1)

    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(destinations, "seal_written", killed)
        with pytest.raises(KeyboardInterrupt):
            guard.save(step=2)
    assert (tmp_path / "run" / "step-000000002").is_dir()
    assert guard.resume() == 1
    guard.save(step=2)
    assert guard.resume() == 2


@pytest.mark.parametrize("verified", [False, True])
def test_a_training_does_not_begin_again_over_saves_whose_records_are_lost(tmp_path, verified):
    """Without its records a guard's save is never good by itself, and never overwritten: the user says that it is."""
    run, saved = tmp_path / "run", torch.nn.Linear(4, 4)
    with guard_of(run, saved) as guard:
        for step in (1, 2):
            guard.save(step=step)
    shutil.rmtree(run / "_ckptguard")
    if verified:
        report = verify_target(str(run), QUICK)
        assert {one.outcome for one in report.checkpoints} == {Outcome.INCOMPLETE}
        assert what_now(report) == [
            f"if step-000000002 is whole, and only its records are lost: ckptguard reseal {run}/step-000000002"
        ]
    before = {path: path.read_bytes() for path in run.glob("step-*/*")}
    with guard_of(run) as guard, pytest.raises(NoKnownGoodError, match="none of them is good"):
        list(guard.steps("abc", total=3, save_every=1))
    assert {path: path.read_bytes() for path in run.glob("step-*/*")} == before
    assert reseal(look(open_run(str(run))), "step-000000002").outcome is Outcome.GOOD
    model = torch.nn.Linear(4, 4)
    with guard_of(run, model) as guard:
        assert guard.resume() == 2
    assert torch.equal(model.weight, saved.weight)


@pytest.mark.parametrize("trouble", ["manifests", "files"])
def test_a_training_does_not_begin_again_over_saves_that_cannot_be_read(tmp_path, monkeypatch, trouble):
    """Damaged manifests, or files that cannot be read before they had a verdict: the error says so, and all stays."""
    run, saved = tmp_path / "run", torch.nn.Linear(4, 4)
    with guard_of(run, saved) as guard:
        for step in (1, 2):
            guard.save(step=step)
    shutil.rmtree(run / "_ckptguard" / "ledger", ignore_errors=True)
    before = {path: path.read_bytes() for path in run.glob("step-*/*")}
    with monkeypatch.context() as broken:
        if trouble == "manifests":
            for manifest in run.glob("_ckptguard/manifests/*/*.json"):
                manifest.write_bytes(b"")
        else:
            real = LocalStorage.open

            def fails(self, key):
                if key.endswith("model.safetensors"):
                    raise StorageError(f"{key} cannot be read", key=key)
                return real(self, key)

            broken.setattr(LocalStorage, "open", fails)
        with guard_of(run) as guard, pytest.raises(CouldNotTellError, match="step-000000002"):
            list(guard.steps("abc", total=3, save_every=1))
    assert {path: path.read_bytes() for path in run.glob("step-*/*")} == before
    if trouble == "manifests":
        assert reseal(look(open_run(str(run))), "step-000000002").outcome is Outcome.GOOD
    model = torch.nn.Linear(4, 4)
    with guard_of(run, model) as guard:
        assert guard.resume() == 2
    assert torch.equal(model.weight, saved.weight)


def test_resealing_lost_records_still_reads_what_was_saved(tmp_path):
    """Only the missing manifest is forgiven: NaN is bad, and a missing file is incomplete."""
    run = tmp_path / "run"
    with guard_of(run) as guard:
        for step in (1, 2):
            guard.save(step=step)
    shutil.rmtree(run / "_ckptguard")
    save_file({"weight": torch.full((4, 4), torch.nan)}, run / "step-000000001" / "model.safetensors")
    (run / "step-000000002" / "state.json").unlink()
    verify_target(str(run), QUICK)
    view = look(open_run(str(run)))
    assert reseal(view, "step-000000001").outcome is Outcome.BAD
    assert reseal(view, "step-000000002").outcome is Outcome.INCOMPLETE


def test_a_loop_that_is_left_can_be_saved_and_resumed(tmp_path):
    """After a break, save() saves the update that was observed, and a resume goes on with the next batch."""
    model = torch.nn.Linear(4, 4)
    with guard_of(tmp_path / "run", model) as guard:
        for step, _ in guard.steps("abcdef", total=6, save_every=10):
            guard.observe(loss=1.0)
            if step == 3:
                break
        guard.save()
    with guard_of(tmp_path / "run", model) as guard:
        assert [batch for _, batch in guard.steps("abcdef", total=6, save_every=10)] == ["d", "e", "f"]


def test_a_loop_of_ones_own(tmp_path):
    """Without steps(): resume, save and rollback take and give the step."""
    model = torch.nn.Linear(4, 4)
    guard = guard_of(tmp_path / "run", model)
    assert guard.resume() == 0
    for step in range(1, 5):
        with torch.no_grad():
            model.weight.fill_(step)
        assert not guard.observe(loss=1.0).sick
        if step % 2 == 0:
            guard.save(step=step)
    with torch.no_grad():
        model.weight.mul_(1e30).mul_(1e30)
    assert guard.observe(loss=float("nan")).cause == "weights"
    assert guard.rollback("it is sick") == 4
    assert model.weight.unique().tolist() == [4.0]
    with pytest.raises(SettingsError, match="how many updates"):
        guard_of(tmp_path / "run", model).save()


def test_the_first_save_needs_no_optimizer_state(tmp_path):
    """Before the first update there is none; verified again after later saves, the first one is still GOOD."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    with ckptguard.TrainingGuard(
        tmp_path / "run", model=model, optimizer=optimizer, daemon="off", settings=QUICK
    ) as guard:
        for _ in guard.steps([1], total=2, save_every=1):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    for _ in range(2):
        checked = verify_target(str(tmp_path / "run"), QUICK, Selection(step=2)).checkpoints
        checked += verify_target(str(tmp_path / "run"), QUICK).checkpoints
        assert {c.outcome for c in checked} == {Outcome.GOOD}


def test_a_save_that_cannot_be_sealed_leaves_nothing(tmp_path, monkeypatch):
    """If the manifest cannot be written, nothing lies under the final name either."""
    guard = guard_of(tmp_path / "run")

    def full(*_, **__):
        raise StorageFullError("no space left", key="manifests")

    monkeypatch.setattr(destinations, "seal_written", full)
    with pytest.raises(StorageFullError):
        guard.save(step=2)
    assert not list((tmp_path / "run").glob("*step*"))


def test_leftovers_of_killed_saves_are_removed_when_they_are_old(tmp_path):
    """A temporary folder that nobody writes to any more goes; a fresh one may be somebody's save."""
    run = tmp_path / "run"
    for name in ("tmp-step-000000001-aaaaaaaa", "tmp-step-000000002-bbbbbbbb"):
        (run / name).mkdir(parents=True)
        (run / name / "model.safetensors").write_bytes(b"x")
    for path in (run / "tmp-step-000000001-aaaaaaaa" / "model.safetensors", run / "tmp-step-000000001-aaaaaaaa"):
        os.utime(path, (1, 1))
    guard_of(run)
    assert [p.name for p in run.iterdir()] == ["tmp-step-000000002-bbbbbbbb"]


def test_tied_weights_and_extra_state_come_back(tmp_path):
    """Tied weights stay tied, and what modules keep beside tensors is kept too."""

    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.note = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), {1: float("inf")}
            self.b.weight = self.a.weight

        def get_extra_state(self):
            return self.note

        def set_extra_state(self, state):
            self.note = state

    model = Tied()
    before = model.a.weight.detach().clone()
    guard = guard_of(tmp_path / "run", model)
    guard.save(step=1)
    with torch.no_grad():
        model.a.weight.zero_()
    model.note = None
    guard.resume()
    assert torch.equal(model.b.weight, before)
    assert model.a.weight.data_ptr() == model.b.weight.data_ptr()
    assert model.note == {1: float("inf")}


def test_without_our_record_the_epoch_begins_anew(tmp_path, caplog):
    """The user's checkpoint from elsewhere resumes at its step; where the data was is unknown, and that is said."""
    run = tmp_path / "run"
    run.mkdir()
    model = torch.nn.Linear(4, 4)
    torch.save(model.state_dict(), run / "step-6.pt")

    def load(path):
        model.load_state_dict(torch.load(path))

    with (
        caplog.at_level(logging.WARNING, logger="ckptguard"),
        guard_of(run, model, save=lambda path, step: torch.save(model.state_dict(), path), load=load) as guard,
    ):
        taken = list(guard.steps("abcd", total=8, save_every=10))
    assert taken == [(7, "a"), (8, "b")]
    assert "epoch starts again" in caplog.text


@pytest.mark.parametrize("name", ["last.pt", "../step-{step}.pt", "step-{n}.pt", "step-{step:09d}", "tmp-{step}.pt"])
def test_names_that_cannot_work_are_refused(tmp_path, name):
    """A name must hold the step, stay in the run, and be no name of ours."""
    with pytest.raises(SettingsError):
        guard_of(tmp_path / "run", save=lambda path, step: None, load=lambda path: None, name=name)


@pytest.mark.parametrize("options", [{"save": lambda p, s: None}, {"daemon": "maybe"}])
def test_options_that_cannot_be_meant_are_refused(tmp_path, options):
    """One clear sentence at construction."""
    with pytest.raises(SettingsError):
        guard_of(tmp_path / "run", **options)
    with pytest.raises(SettingsError):
        ckptguard.RollbackPolicy(check_every=0)


def test_objects_that_are_no_guards_are_refused(tmp_path):
    """A keyword that is misspelt is not passed over, and there must be a model."""
    with pytest.raises(TypeError, match="optimiser"):
        guard_of(tmp_path / "run", optimiser=None)
    with pytest.raises(TypeError, match="'model'"):
        ckptguard.TrainingGuard(tmp_path / "run", daemon="off")
