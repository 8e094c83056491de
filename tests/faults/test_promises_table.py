"""What failed on real trainers, each by its name: what their users do, and what must come of it.

The trainers write as theirs do (see `support.trainer_world`), and passes are made as a daemon makes them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from support.runs import QUICK
from support.supervised_runs import save_watch
from support.tiny_training import Training as Loop
from support.trainer_world import TRAINERS, Disk, Training, archive
from support.views import look

import ckptguard
from ckptguard.cli.entry import commands
from ckptguard.errors import NoKnownGoodError
from ckptguard.inspect.list_states import survey
from ckptguard.inspect.status import status
from ckptguard.records.incidents import list_incidents
from ckptguard.records.run import open_run
from ckptguard.recover.restore import restore
from ckptguard.recover.roll_back import GoBack, roll_back
from ckptguard.reporting.open_and_close import record_bad_save
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.scan import scan_files
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome

BY_NAME = {trainer.name: trainer for trainer in TRAINERS}


class Run:
    """A run, its training, and the daemon that makes passes over it."""

    def __init__(self, root: Path, name: str, settings: Settings = QUICK) -> None:
        root.mkdir()
        self.root, self.settings, self.notes = root, settings, PassNotes()
        self.training = Training(BY_NAME[name], Disk(str(root)))

    def saves(self, count: int = 1, **how):
        """So many saves, with a pass after each; what the last pass found."""
        for _ in range(count):
            self.training.save(**how)
            done = self.a_pass()
        return done

    def a_pass(self, *, quiet: bool = True):
        """One pass of the daemon, with the incidents that it opens."""
        done = reconcile(self.view(), self.notes, assume_quiet=quiet)
        for one in done.checked:
            record_bad_save(open_run(str(self.root)), one, source="daemon")
        return done

    def view(self):
        """A fresh look."""
        return look(str(self.root), self.settings)

    def restored(self, out: Path) -> bytes:
        """What comes back."""
        return Path(restore(self.view(), str(out)).path).read_bytes()

    def outcomes(self) -> dict[str, Outcome]:
        """Every verdict, by id."""
        return {str(s.id): s.outcome for s in survey(self.view()) if s.id is not None}

    def incidents(self):
        """All of them."""
        return list_incidents(open_run(str(self.root)))


@pytest.fixture
def a_run(tmp_path, monkeypatch):
    """Make a run for a trainer."""
    monkeypatch.setenv("CKPTGUARD_SETTLE", "0")
    return lambda name, settings=QUICK: Run(tmp_path / "run", name, settings)


@pytest.mark.parametrize("how", ["whole", "killed"])
def test_a_script_saves_over_a_checkpoint_in_place(a_run, tmp_path, how):
    """The kept copy of `epoch_2.pt` does not die with it: what `status` called protected comes back."""
    run = a_run("a script")
    run.saves(2)
    assert status(run.view()).protected
    good = run.training.disk.read("epoch_2.pt")
    new = archive("epoch", 2, 77, 77, finite=False)
    inode = (run.root / "epoch_2.pt").stat().st_ino
    run.training.disk.write("epoch_2.pt", new if how == "whole" else new[: len(new) // 2])
    assert (run.root / "epoch_2.pt").stat().st_ino == inode, "it was saved over in place"
    assert run.restored(tmp_path / "out") == good


def test_a_restarted_trainer_writes_nan_over_a_good_checkpoint(a_run, tmp_path):
    """No door calls `epoch_2.pt` good that now holds NaN in as many bytes; what they answer is finite."""
    run = a_run("a script")
    run.saves(2)
    good = {path.read_bytes() for path in run.root.glob("*.pt")}
    nan = archive("epoch", 2, 1, 1, finite=False)
    assert len(nan) == len((run.root / "epoch_2.pt").read_bytes())
    run.training.disk.write("epoch_2.pt", nan, in_place=False)
    assert Path(find_known_good(open_run(str(run.root))).path).read_bytes() in good
    assert Path(status(run.view()).known_good.path).read_bytes() in good
    named = [s for s in survey(run.view()) if s.in_place and s.path == "epoch_2.pt"]
    assert [s.changed for s in named] == [True]
    said = CliRunner().invoke(commands, ["known-good", str(run.root)], prog_name="ckptguard")
    assert Path(said.stdout.strip()).read_bytes() in good, said.output
    for command in (["list", str(run.root)], ["status", str(run.root)], ["show", str(run.root / "epoch_2.pt")]):
        said = CliRunner().invoke(commands, command, prog_name="ckptguard")
        assert "changed" in said.output or "bad" in said.output, said.output
    assert run.restored(tmp_path / "out") in good


def test_nanogpt_saves_over_its_one_name_ten_times_well_and_then_with_nan(a_run, tmp_path):
    """There is an incident, and the last good content to go back to, which its own resume loads."""
    run = a_run("nanoGPT")
    run.saves(10)
    good = run.training.disk.read("ckpt.pt")
    assert status(run.view()).protected
    run.training.poisoned = True
    run.saves(20)
    assert run.incidents()
    assert find_known_good(open_run(str(run.root))).id.step is None
    assert run.restored(tmp_path / "out") == good
    roll_back(run.view(), GoBack(reason="loss", check_writing=False))
    assert run.training.disk.read("ckpt.pt") == good
    assert run.training.resume()
    assert run.training.step == 10


def test_the_hugging_face_trainer_keeps_one_save_and_saves_faster_than_settle(a_run, tmp_path):
    """A checkpoint that is rotated away within a second is judged by its copy: there is a known-good one."""
    run = a_run("HF", Settings(settle=5.0, scan_interval=1.0))
    saved = {}
    for step in range(1, 13):
        run.training.save()
        saved[f"checkpoint-{step}"] = run.training.disk.at(f"checkpoint-{step}")
        run.a_pass(quiet=False)
        for path in run.training.numbered()[:-1]:
            run.training.disk.remove(path)
    run.training.disk.remove("checkpoint-12")  # the next one was begun
    run.a_pass(quiet=False)
    good = [id for id, outcome in run.outcomes().items() if outcome is Outcome.GOOD]
    assert len(good) >= 12 // QUICK.keep_pending, run.outcomes()
    done = restore(run.view(), str(tmp_path / "out"))
    assert Disk(str(tmp_path / "out")).at(Path(done.path).name) == saved[Path(done.path).name]


class Supervised:
    """What supervise does about the saves of a command, without its processes."""

    def __init__(self, run: Run) -> None:
        self.run = run
        kept = QUICK.changed(keep_good=3)
        self.watch = save_watch(str(run.root), kept, scan_files)
        self.watch.prepare()
        self.watch.begin()

    def trains(self, good: int) -> None:
        """So many good saves, each of them judged, and one with NaN."""
        for _ in range(good):
            self.run.training.save()
            assert self.watch.last_look() == []
        self.run.training.poisoned = True
        self.run.training.save()

    def goes_back(self) -> None:
        """The sick save is seen, and the command is to be started again."""
        sick = self.watch.last_look()
        assert sick, "the newest save has NaN in it, and nobody says so"
        self.watch.back.go_back(sick, "the command has sick saves")
        self.watch.begin()


@pytest.mark.parametrize("name", [trainer.name for trainer in TRAINERS])
def test_a_supervised_trainer_resumes_from_its_own_name(a_run, name):
    """open_clip began from scratch, timm found no `last.pth.tar`, fairseq's NaN was ignored: each of them goes on from
    the last good save now."""
    run = a_run(name)
    supervised = Supervised(run)
    supervised.trains(3)
    supervised.goes_back()
    assert run.training.resume(), "its resume finds nothing"
    assert not run.training.poisoned
    assert run.training.step == 3
    run.training.save()
    assert supervised.watch.last_look() == [], "what goes on from there is well"


def test_a_training_that_begins_from_scratch_after_all_is_seen(a_run):
    """The first save after the restart is compared with what was gone back to."""
    run = a_run("open_clip")
    supervised = Supervised(run)
    supervised.trains(3)
    supervised.goes_back()
    run.training.restart()
    run.training.save()
    assert supervised.watch.last_look(), "training started from scratch, and nobody says so"


@pytest.mark.parametrize(
    ("names", "newest"),
    [
        (("checkpoint_1_500.pt", "checkpoint_1_1000.pt", "checkpoint_1_1500.pt"), "checkpoint_1_1000.pt"),
        (("recovery-0-950.pth.tar", "recovery-1-50.pth.tar", "recovery-1-100.pth.tar"), "recovery-1-50.pth.tar"),
        (("model_000002.bin", "model_000004.bin", "model_000006.bin"), "model_000004.bin"),
    ],
)
def test_names_of_several_numbers_and_of_many_digits_are_in_order(a_run, names, newest):
    """The last of three has NaN in it: it is BAD, and the one before it is known-good."""
    run = a_run("nanoGPT")
    for number, name in enumerate(names):
        run.training.disk.write(name, archive("other", number, number, number, finite=number < 2))
        run.a_pass()
    assert sorted(o.value for o in run.outcomes().values()) == ["bad", "good", "good"]
    found = find_known_good(open_run(str(run.root)))
    assert Path(found.path).name == newest
    assert roll_back(run.view(), GoBack(reason="loss", check_writing=False)).known_good.id == found.id
    assert not (run.root / names[2]).exists()
    assert (run.root / newest).exists()


def test_nanogpt_resumes_and_saves_at_once(a_run):
    """Equal weights with another `best_val_loss` are a new save, GOOD, and no incident."""
    run = a_run("nanoGPT")
    run.saves(3)
    assert run.training.resume()
    run.saves(again=True)
    assert run.outcomes() == dict.fromkeys(["-.1", "-.2", "-.3", "-.4"], Outcome.GOOD)
    assert run.incidents() == []


def test_a_nan_save_is_rotated_away_and_its_step_is_saved_again(a_run):
    """Healthy, with one tensor differing: a new save, not damage."""
    run = a_run("a script")
    run.saves(2)
    state = torch.load(run.root / "epoch_2.pt")
    path = run.root / "epoch_3.pt"
    for value in (float("nan"), 0.5):
        state["epoch"], state["model"]["b"][1, 1] = 3, value
        path.unlink(missing_ok=True)
        run.a_pass()
        torch.save(state, path)
        run.a_pass()
    assert run.outcomes()["3.1"] is Outcome.BAD
    assert run.outcomes()["3.2"] is Outcome.GOOD
    assert Path(find_known_good(open_run(str(run.root)), series="epoch_#.pt").path).name == "epoch_3.pt"


def test_the_loop_of_the_readme_ends_without_close(a_run, tmp_path):
    """Its last save, the one that people ship, has its verdict."""
    loop = Loop()
    guard = ckptguard.TrainingGuard(tmp_path / "loop", **loop.parts(), daemon="off", settings=QUICK)
    for step, batch in guard.steps(loop.loader, total=6, save_every=3):
        loss, norm = loop.update(step, batch)
        guard.observe(loss=loss, grad_norm=norm)
    states = survey(look(str(tmp_path / "loop")))
    assert {str(s.id): s.outcome.value for s in states}["6.1"] == "good"


def test_where_nothing_is_good_nothing_is_moved(a_run):
    """A rollback of a trainer that was sick from the first says so, and leaves everything where it lies."""
    run = a_run("nanoGPT")
    run.training.poisoned = True
    run.saves(2)
    before = run.training.disk.all()
    with pytest.raises(NoKnownGoodError):
        roll_back(run.view(), GoBack(reason="loss", check_writing=False))
    assert run.training.disk.all() == before
