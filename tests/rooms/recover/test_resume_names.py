"""After a rollback every name that a trainer's own resume reads holds known-good content, or nothing was moved."""

import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.runs import QUICK
from support.trainer_saves import SICK, TRAINERS, load, open_clip, save, training_state, two_folders, update_of
from support.views import look

from ckptguard.errors import NoKnownGoodError, NotGivenBackError, StorageFullError
from ckptguard.records.kept import list_kept, read_kept
from ckptguard.recover import roll_back as roll_back_module
from ckptguard.recover.restore import restore
from ckptguard.recover.roll_back import GoBack, known_good_of, roll_back
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.ids import numbers_of
from ckptguard.verification import seal
from ckptguard.verification.target import verify_target

COPIES = QUICK.changed(keep="copy", keep_good=3)
BACK = GoBack(reason="NaN", check_writing=False)
ONE_NAME = {name: trainer for name, trainer in TRAINERS.items() if name != "by its number"}  # whatever the epoch


def files(root):
    """What lies in a run, ours aside: names, contents and links."""
    own = [p for p in sorted(root.rglob("*")) if "_ckptguard" not in p.parts]
    return {str(p.relative_to(root)): p.readlink() if p.is_symlink() else p.read_bytes() for p in own if not p.is_dir()}


def look_after(run, notes):
    """One pass of the daemon."""
    return reconcile(look(run, COPIES), notes)


@pytest.fixture
def notes():
    """Of the passes of one test."""
    return PassNotes()


@pytest.mark.parametrize("name", sorted(TRAINERS))
def test_the_name_that_a_trainer_resumes_from_holds_the_known_good(root, run, notes, name):
    """Three healthy epochs and a sick one: the trainer goes on from the third."""
    train, resume = TRAINERS[name]
    for epoch in (1, 2, 3):
        train(root, epoch)
        look_after(run, notes)
    names = set(files(root))
    train(root, 4, sick=SICK)
    look_after(run, notes)
    done = roll_back(look(run, COPIES), BACK)
    assert done.training_step in (3, 10, 30, None)
    assert update_of(load(root / resume)) == 30
    assert set(files(root)) == names, "nothing newer is left, and nothing is missing"
    for path in names:
        assert 0 < update_of(load(root / path)) <= 30
        assert os.stat(root / path).st_nlink == 1 or name == "timm"
    again = roll_back(look(run, COPIES), BACK)
    assert (again.quarantined, again.given, again.put_back) == ((), (), False), "it is as it should be"


@pytest.mark.parametrize("order", [sorted, lambda paths: sorted(paths, reverse=True)], ids=["one way", "other way"])
@pytest.mark.parametrize("name", sorted(ONE_NAME.keys() - {"by a link"}))
def test_restored_elsewhere_it_has_the_name_that_is_resumed_from(root, run, tmp_path, monkeypatch, name, order):
    """Whichever of several names of one save was looked at last."""
    monkeypatch.setattr(seal, "utc_now", map("2026-01-01T00:{:02}:00Z".format, range(60)).__next__)
    train, resume = TRAINERS[name]
    for epoch in (1, 2):
        train(root, epoch)
        saved = files(root)
        for path in saved:
            (root / path).unlink()
        for path in order(saved):
            (root / path).write_bytes(saved[path])
            verify_target(str(root), QUICK)
    done = restore(look(run), str(tmp_path / "out"))
    assert done.path == str(tmp_path / "out" / resume.rpartition("/")[2])
    assert update_of(load(done.path)) == 20


def test_of_equal_saves_a_kept_copy_counts_and_what_is_lost_does_not(root, run, notes):
    """``last.pt`` was saved over with NaN: its copy is known-good. Without one it is ``epoch_3.pt``, and a rollback
    gives that content to ``last.pt``, too."""
    for path in ("best.pt", "epoch_3.pt", "last.pt"):
        save(root / path, 30, epoch=3)
    look_after(run, notes)
    save(root / "last.pt", 40, sick=SICK, epoch=4)
    look_after(run, notes)
    found = find_known_good(look(run).run)
    assert (found.series, found.place) == ("last.pt", "kept")
    for copy in filter(None, (read_kept(run, id) for id in list_kept(run))):
        if copy.series == "last.pt":
            run.records.remove(copy.folder)
    found = find_known_good(look(run).run)
    assert (found.series, found.place) == ("epoch_#.pt", "in place")
    roll_back(look(run, COPIES), BACK)
    assert {path: update_of(load(root / path)) for path in files(root)} == dict.fromkeys(files(root), 30)
    assert "last.pt" in files(root)


@pytest.mark.parametrize("name", sorted(ONE_NAME))
def test_training_that_saves_on_does_not_write_into_what_was_given_back(root, run, notes, name):
    """What is given back shares no bytes with another name or a kept copy: it is written over in place; they stay."""
    train, resume = TRAINERS[name]
    for epoch in (1, 2):
        train(root, epoch)
        look_after(run, notes)
    train(root, 3, sick=SICK)
    look_after(run, notes)
    roll_back(look(run, COPIES), BACK)
    torch.save(training_state(90, sick=SICK), root / resume)  # in place
    look_after(run, notes)
    roll_back(look(run, COPIES), BACK)
    assert update_of(load(root / resume)) == 20


@pytest.mark.parametrize("names", [("G_{}.pt", "D_{}.pt"), ("models/net_g_{}.pt", "states/iter_{}.pt")])
@pytest.mark.parametrize("sick", [0, 1])
def test_what_was_saved_together_goes_back_together(root, run, notes, names, sick):
    """Parts of one save, of which one is sick: no part of it stays, for a resume needs all of them."""
    for epoch in (1, 2, 3):
        for number, name in enumerate(names):
            save(root / name.format(epoch), epoch * 10, sick=(epoch, number) == (3, sick))
        torch.save({"activations": torch.full((4, 4), float("nan"))}, root / f"dump_{epoch}.pt")
        look_after(run, notes)
    roll_back(look(run, COPIES), BACK)
    left = {name for name in files(root) if "dump" not in name}
    assert left == {name.format(epoch) for name in names for epoch in (1, 2)}


def test_a_name_without_a_kept_copy_gets_the_content_of_a_numbered_one(root, run):
    """epoch_2.pt as epoch_latest.pt; a dry run says so, and JSON too."""
    notes = PassNotes()
    plain = QUICK.changed(keep="none")
    for epoch in (1, 2):
        open_clip(root, epoch)
        reconcile(look(run, plain), notes)
    open_clip(root, 3, sick=SICK)
    reconcile(look(run, plain), notes)
    before = files(root)
    planned = roll_back(look(run, plain), GoBack(reason="NaN", check_writing=False, dry_run=True))
    assert files(root) == before
    done = roll_back(look(run, plain), BACK)
    assert (
        [(g.path, g.source) for g in done.given]
        == [("epoch_latest.pt", "epoch_2.pt")]
        == [(g.path, g.source) for g in planned.given]
    )
    assert sorted(done.quarantined) == ["epoch_3.pt", "epoch_latest.pt"] == sorted(planned.quarantined)
    assert update_of(load(root / "epoch_latest.pt")) == 20
    assert not (root / "epoch_3.pt").exists()


def test_where_a_name_can_hold_nothing_good_nothing_is_moved(root, run):
    """last.pt holds more than any numbered checkpoint does, and no copy of it was kept."""
    plain = QUICK.changed(keep="none")
    for epoch in (1, 2):
        save(root / f"epoch_{epoch}.pt", epoch * 10, epoch=epoch)
    save(root / "epoch_3.pt", 30, epoch=3, sick=SICK)
    state = training_state(30, sick=SICK, epoch=3)
    state["ema"] = dict(state["model"])
    torch.save(state, root / "last.pt")
    reconcile(look(run, plain), PassNotes())
    before = files(root)
    with pytest.raises(NotGivenBackError, match=r"last\.pt cannot be put back.*Nothing was moved"):
        roll_back(look(run, plain), BACK)
    assert files(root) == before
    (root / "last.pt").unlink()
    assert roll_back(look(run, plain), BACK).quarantined == ("epoch_3.pt",)
    assert issubclass(NotGivenBackError, NoKnownGoodError)


def test_weights_alone_that_are_good_stay_and_sick_ones_go(root, run, notes):
    """Nothing resumes from them where the known-good has an optimizer's state."""
    for epoch in (1, 2):
        save(root / f"epoch_{epoch}.pt", epoch * 10, epoch=epoch)
    torch.save(training_state(20)["model"], root / "best.pt")
    look_after(run, notes)
    save(root / "epoch_3.pt", 30, epoch=3, sick=SICK)
    torch.save({"activations": torch.full((4, 4), float("nan"))}, root / "dump.pt")
    look_after(run, notes)
    done = roll_back(look(run, COPIES), BACK)
    assert sorted(done.quarantined) == ["dump.pt", "epoch_3.pt"]
    assert sorted(files(root)) == ["best.pt", "epoch_1.pt", "epoch_2.pt"]


def test_pointers_of_every_kind_follow(root, run, notes):
    """A link, a word, detectron2's path in a file; what names an older one stays."""
    for epoch in (1, 2):
        save(root / f"model_{epoch}.pth", epoch * 10, iteration=epoch * 10)
    save(root / "model_3.pth", 30, iteration=30, sick=SICK)
    (root / "latest.pth").symlink_to("model_3.pth")
    (root / "first.pth").symlink_to("model_1.pth")
    (root / "latest").write_text("model_3.pth")
    (root / "last_checkpoint").write_text(f"{root}/model_3.pth\n")
    (root / "notes.txt").write_text("model_7.pth")
    look_after(run, notes)
    done = roll_back(look(run, COPIES), BACK)
    assert {p.key for p in done.pointed} == {"latest.pth", "latest", "last_checkpoint"}
    assert os.readlink(root / "latest.pth") == "model_2.pth"
    assert os.readlink(root / "first.pth") == "model_1.pth"
    assert (root / "latest").read_text() == "model_2.pth"
    assert (root / "last_checkpoint").read_text() == f"{root}/model_2.pth\n"
    assert (root / "notes.txt").read_text() == "model_7.pth"


def test_pointers_name_checkpoints_in_other_folders(root, run, notes):
    """A link, and a path as seen from the pointer, from the run, or from anywhere; a bare name says nothing of them."""
    for epoch in (1, 2):
        save(root / f"epochs/epoch_{epoch}.pt", epoch * 10, epoch=epoch)
    save(root / "epochs/epoch_3.pt", 30, epoch=3, sick=SICK)
    save(root / "weights/best.pt", 10, epoch=1)
    (root / "weights/link.pt").symlink_to("../epochs/epoch_3.pt")
    (root / "whole.pt").symlink_to(root / "epochs/epoch_3.pt")
    texts = {"latest": "epochs/{}", "last_checkpoint": f"{root}/epochs/{{}}\n", "epochs/latest": "{}"}
    for key, text in {**texts, "notes.txt": "{}"}.items():
        (root / key).write_text(text.format("epoch_3.pt"))
    look_after(run, notes)
    done = roll_back(look(run, COPIES), BACK)
    assert {p.key for p in done.pointed} == {"weights/link.pt", "whole.pt", *texts}
    assert {p.path for p in done.pointed} == {"epochs/epoch_2.pt"}
    for name in ("weights/link.pt", "whole.pt"):
        assert update_of(load(root / name)) == 20
    for key, text in texts.items():
        assert (root / key).read_text() == text.format("epoch_2.pt")
    assert (root / "notes.txt").read_text() == "epoch_3.pt"


@pytest.mark.parametrize("bare", [True, False])
def test_a_pointer_that_could_name_nothing_good_refuses_the_rollback(root, run, bare):
    """Its folder holds nothing good, and a bare name reaches no other one; a path does."""
    save(root / "epochs/epoch_2.pt", 20, epoch=2)
    save(root / "weights/step_30.pt", 30, epoch=3, sick=SICK)
    pointer = root / ("weights/latest" if bare else "latest")
    pointer.write_text("step_30.pt" if bare else "weights/step_30.pt")
    reconcile(look(run, COPIES), PassNotes())
    before = files(root)
    if bare:
        with pytest.raises(NotGivenBackError, match="weights/latest cannot be put back"):
            roll_back(look(run, COPIES), BACK)
        assert files(root) == before
    else:
        roll_back(look(run, COPIES), BACK)
        assert pointer.read_text() == "epochs/epoch_2.pt"


def test_other_trainings_in_one_run_stay_and_what_is_bad_there_is_named(root, run, notes):
    """A sweep: every training has the same names, in a folder of its own."""
    for epoch in (1, 2, 3):
        for seed in ("seed0", "seed1", "seed2"):
            two_folders(root / seed, epoch, sick=SICK if (seed, epoch) in {("seed1", 3), ("seed2", 3)} else not SICK)
        look_after(run, notes)
    two_folders(root / "seed0", 4)
    look_after(run, notes)
    before = files(root)
    done = roll_back(
        look(run, COPIES), replace(BACK, to_id=known_good_of(look(run, COPIES), "seed1/epochs/epoch_2.pt", None))
    )
    after = files(root)
    assert {p for p in before if before[p] != after.get(p)} == {"seed1/epochs/epoch_3.pt", "seed1/weights/last.pt"}
    assert update_of(load(root / "seed1/weights/last.pt")) == 20
    assert done.left_bad == ("seed2/epochs/epoch_3.pt", "seed2/weights/last.pt")


def test_a_rollback_that_was_cut_short_is_finished_by_the_next(root, run, notes, monkeypatch):
    """Between the move aside and the new name, a kill leaves the name empty."""
    for epoch in (1, 2):
        open_clip(root, epoch)
        look_after(run, notes)
    open_clip(root, 3, sick=SICK)
    look_after(run, notes)

    class Killed(BaseException):
        """The end of the process."""

    def dies(*arguments):
        raise Killed

    monkeypatch.setattr(roll_back_module, "_suspect_copies", dies)
    with pytest.raises(Killed):
        roll_back(look(run, COPIES), BACK)
    monkeypatch.undo()
    assert not (root / "epoch_latest.pt").exists()
    roll_back(look(run, COPIES), BACK)
    assert update_of(load(root / "epoch_latest.pt")) == 20
    assert sorted(files(root)) == ["epoch_1.pt", "epoch_2.pt", "epoch_latest.pt"]


def test_a_full_disk_moves_nothing(root, run, notes, monkeypatch):
    """What is given back is staged first."""
    for epoch in (1, 2):
        open_clip(root, epoch)
        look_after(run, notes)
    open_clip(root, 3, sick=SICK)
    look_after(run, notes)
    before = files(root)

    def full(*arguments, **more):
        raise StorageFullError("no space left", key="epoch_latest.pt")

    monkeypatch.setattr(roll_back_module, "copy_differs", full)
    with pytest.raises(StorageFullError):
        roll_back(look(run, COPIES), BACK)
    assert files(root) == before


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(
    "names",
    [
        ["best_0.35.pt", "best_0.41.pt", "best_0.52.pt"],
        ["best_0.52.pt", "best_0.41.pt", "best_0.35.pt"],
        ["ckpt_1700000000000.pt", "ckpt_1700000001000.pt", "ckpt_1700000002000.pt"],
        ["ckpt_3.pt", "ckpt_03.pt", "ckpt_003.pt"],
        ["run_1_ckpt_3.pt", "run_2_ckpt_3.pt", "run_3_ckpt_3.pt"],
    ],
)
@pytest.mark.parametrize("gone", [False, True])
def test_of_several_names_without_a_step_or_with_one_step_the_later_saved_go(root, run, notes, names, at_once, gone):
    """Their order is that of saving, and each of them is a file of its own."""
    for update, name in enumerate(names, 1):
        torch.save(training_state(update, sick=update == 3), root / name)
        os.utime(root / name, (update * 100, update * 100))
        if not at_once:
            look_after(run, notes)
    look_after(run, notes)
    if gone:
        (root / names[1]).unlink()
    roll_back(look(run, COPIES), BACK)
    assert {name: update_of(load(root / name)) for name in files(root)} == {names[0]: 1, names[1]: 2}


@pytest.mark.parametrize("sick", [False, True])
def test_a_fixed_name_that_nobody_looked_at_yet_is_verified_first(root, run, notes, sick):
    """It appeared since the last pass; what it is to hold is told by its own bytes."""
    for epoch in (1, 2):
        save(root / f"epoch_{epoch}.pt", epoch * 10, epoch=epoch)
    look_after(run, notes)
    save(root / "epoch_3.pt", 30, sick=SICK, epoch=3)
    save(root / "last.pt", 30 if sick else 20, sick=sick, epoch=3 if sick else 2)
    for path in root.glob("*.pt"):
        os.utime(path, (path.stat().st_mtime - 100, path.stat().st_mtime - 100))
    roll_back(look(run, COPIES), BACK)
    assert update_of(load(root / "last.pt")) == 20
    assert not (root / "epoch_3.pt").exists()


NUMBERED = "epoch_{}.pt", "recovery-0-{}.pt", "epochs/epoch-{}.pt"
FIXED = "last.pt", "other.pt", "weights/latest.pt"


class Saving(NamedTuple):
    """What a trainer does after an epoch: which names it saves to, and how."""

    names: tuple[str, ...]
    sick: bool
    in_place: bool
    loses: str | None  # a name that its rotation deletes afterwards
    seen: bool  # there is a pass of the daemon


SAVINGS = st.builds(
    Saving,
    names=st.lists(st.sampled_from((*NUMBERED, *FIXED)), min_size=1, unique=True).map(tuple),
    sick=st.booleans(),
    in_place=st.booleans(),
    loses=st.none() | st.sampled_from(("epoch_1.pt", "epochs/epoch-2.pt", "last.pt", "weights/latest.pt")),
    seen=st.booleans(),
)


def train(run, epoch, saving, counts, notes, keep):
    """One epoch of it."""
    for pattern in saving.names:
        path = run / pattern.format(epoch)
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = {"epoch": epoch} if counts else {}
        if saving.in_place:
            torch.save(training_state(epoch * 10, sick=saving.sick, **beside), path)
        else:
            save(path, epoch * 10, sick=saving.sick, **beside)
    if saving.loses:
        (run / saving.loses).unlink(missing_ok=True)
    if saving.seen:
        reconcile(look(str(run), keep), notes)


@settings(max_examples=12, deadline=None)
@given(st.lists(SAVINGS, min_size=2, max_size=5), st.booleans(), st.sampled_from(["none", "auto", "copy"]))
def test_every_name_resumes_or_nothing_has_changed(savings, counts, keep):
    """And what is gone back to is as new as anything that is good and present; going back again changes nothing."""
    folder = Path(tempfile.mkdtemp())
    try:
        kept = QUICK.changed(keep=keep, keep_good=2)
        notes = PassNotes()
        for epoch, saving in enumerate(savings, 1):
            train(folder, epoch, saving, counts, notes, kept)
        reconcile(look(str(folder), kept), notes)
        before = files(folder)
        back = GoBack(reason="NaN", check_writing=False)
        try:
            done = roll_back(look(str(folder), kept), back)
        except NoKnownGoodError:
            assert files(folder) == before
            return
        after = files(folder)
        newest = update_of(load(Path(done.known_good.path)))
        assert newest > 0
        checkpoints = look(str(folder), kept).checkpoints
        for series in {c.series for c in checkpoints}:  # of a numbered one its newest counts; old ones are history
            name = max((c for c in checkpoints if c.series == series), key=lambda c: numbers_of(c.step)).path
            assert 0 < update_of(load(folder / name)) <= newest, name
        assert set(FIXED) & set(before) <= set(after), "no fixed name is lost"
        again = roll_back(look(str(folder), kept), back)
        assert (again.quarantined, again.given) == ((), ())
        assert files(folder) == after
    finally:
        shutil.rmtree(folder)
