"""Trainers that save in several files, through the command line: all of their files go back to one moment."""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from support.faults import flip
from support.several_files import TRAINERS, SeveralFiles, optimizer, save, step_of, vits, weights
from support.views import look

from ckptguard.engine.sick_saves import find_fresh_start
from ckptguard.keep.copies import release
from ckptguard.keep.room import held_copies
from ckptguard.records.run import open_run
from ckptguard.records.trash import list_trashed
from ckptguard.recover.rollback_scope import content_of
from ckptguard.runs.find_known_good import known_good_candidates
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.exit_codes import ExitCode
from ckptguard.values.settings import Settings

QUICK = Settings(settle=0.0, scan_interval=1.0)
BEGAN = 1_700_000_000  # in seconds; every later time is one of now
# From which save on each of two parts holds NaN.
POISONED = {"one after the other": (400, 500), "at once": (400, 400), "the other one": (500, 400)}


def trained(root: Path, trainer: SeveralFiles, g: int, d: int) -> None:
    """Five saves beside a daemon, ten minutes apart. From the save `g` on one part is poisoned, from `d` on another."""
    notes = PassNotes()
    for step in (100, 200, 300, 400, 500):
        trainer.save(root, step, frozenset("g" * (step >= g) + "d" * (step >= d)))
        for path in root.rglob("*"):
            if path.is_file() and "_ckptguard" not in path.parts and path.stat().st_mtime > BEGAN + 6 * 500:
                os.utime(path, (BEGAN + 6 * step, BEGAN + 6 * step))
        reconcile(look(str(root), QUICK), notes)


def saved(root: Path) -> list[Path]:
    """The files with state that lie in a run."""
    found = [p for p in root.rglob("*") if p.is_file() and "_ckptguard" not in p.parts]
    return [p for p in found if p.suffix != ".json" and not p.name.startswith("last_checkpoint")]


@pytest.mark.parametrize("poisoned", POISONED)
@pytest.mark.parametrize("name", TRAINERS)
def test_a_training_of_several_files_goes_back_to_one_moment(root, invoke, document, name, poisoned):
    """The newest of which all files are good; nothing newer is left, and status and known-good say the same."""
    trainer = TRAINERS[name]
    trained(root, trainer, *POISONED[poisoned])
    printed = Path(invoke("known-good", root).stdout.strip())
    assert printed.name == trainer.known_good
    assert Path(document("status", root)[1]["known_good"]["path"]).name == trainer.known_good
    assert Path(document("rollback", root, "--dry-run")[1]["known_good"]["path"]).name == trainer.known_good
    assert invoke("rollback", root).exit_code == 0
    assert {path: step_of(root / path) for path in trainer.resumes} == dict.fromkeys(trainer.resumes, 300)
    assert all((step_of(path) or 999) <= 300 for path in saved(root))
    again = document("rollback", root)[1]
    assert (again["quarantined"], again["given"]) == ([], [])


def test_the_user_says_what_is_apart(root, invoke, document):
    """Then each series goes back by itself: a D that is good stays known-good, whatever G is."""
    trained(root, TRAINERS["VITS"], 400, 600)
    assert Path(invoke("known-good", root).stdout.strip()).name == "G_300.pth"
    (root / "ckptguard.toml").write_text('[[saves]]\napart = ["D_*.pth"]\n')
    answer = json.loads(invoke("known-good", root, "--json", "--config", root / "ckptguard.toml").stdout)
    assert Path(answer["path"]).name == "D_500.pth"


def test_what_the_user_says_is_together_counts_before_names(root, invoke):
    """A ``best`` beside numbers is an alternative, unless the settings join them."""
    notes = PassNotes()
    for step in (100, 200, 300):
        vits(root, step, frozenset())
        reconcile(look(str(root), QUICK), notes)
    config = root / "ckptguard.toml"
    config.write_text('[[saves]]\ntogether = ["*.pth"]\n')
    assert invoke("known-good", root, "--config", config).exit_code == 0
    config.write_text("[[saves]]\n")
    refused = invoke("known-good", root, "--config", config)
    assert refused.exit_code != 0
    assert "together" in refused.stderr


def test_a_plan_says_what_the_way_back_to_a_whole_save_gives_up(root, invoke, document):
    """D_400 is good and G_400 is not. `--only` with a pattern goes back to D_400 alone."""
    trained(root, TRAINERS["VITS"], 400, 500)
    plan = document("rollback", root, "--dry-run")[1]
    assert [(one["series"], one["path"]) for one in plan["newer_alone"]] == [("D_#.pth", "D_400.pth")]
    assert "D_400.pth is good" in invoke("rollback", root, "--dry-run").stdout
    assert Path(document("rollback", root, "--only", "D_*", "--dry-run")[1]["known_good"]["path"]).name == "D_400.pth"
    assert invoke("rollback", root, "--only", "X_*").exit_code == ExitCode.NOT_FOUND


def two_trainings(root: Path, *, sick: str = "") -> None:
    """Two trainings of one model, which save in one folder under equal numbers."""
    notes = PassNotes()
    for step in (100, 200, 300):
        for name in ("small", "large"):
            state = {"model": weights(step, "net", sick=step == 300 and name == sick), "optimizer": optimizer(step)}
            save(root / f"{name}_{step}.pt", state)
        reconcile(look(str(root), QUICK), notes)


def test_what_may_be_another_training_is_asked_about(root, invoke):
    """Nothing is moved until the user says whether both go back, or one."""
    two_trainings(root, sick="small")
    before = sorted(path.name for path in saved(root))
    refused = invoke("rollback", root, "--step", "200")
    assert refused.exit_code == ExitCode.NO_KNOWN_GOOD
    assert "--with" in refused.stderr
    assert "--only" in refused.stderr
    assert sorted(path.name for path in saved(root)) == before
    both = invoke("rollback", root, "--only", "small_#.pt", "--with", "large_#.pt")
    assert both.exit_code == ExitCode.USAGE
    assert "either --only or --with" in both.stderr
    assert sorted(path.name for path in saved(root)) == before
    assert invoke("rollback", root, "--only", "small_#.pt").exit_code == 0
    assert sorted(set(before) - {path.name for path in saved(root)}) == ["small_300.pt"]
    assert invoke("rollback", root, "--with", "nothing_#.pt").exit_code == ExitCode.NOT_FOUND


def test_the_user_says_that_they_go_back_together(root, invoke):
    """Then a good file of the newest save goes with the sick one."""
    two_trainings(root, sick="small")
    assert invoke("rollback", root, "--with", "small_#.pt", "--with", "large_#.pt").exit_code == 0
    assert sorted(path.name for path in saved(root)) == ["large_100.pt", "large_200.pt", "small_100.pt", "small_200.pt"]


def test_a_good_export_stays(root, invoke):
    """Weights alone named ``final``, which no resume reads, though they are newer than the known-good save."""
    notes = PassNotes()
    for step in (100, 200, 300):
        TRAINERS["VITS"].save(root, step, frozenset("g" * (step == 300)))
        save(root / "model_final.pt", weights(step, "net"))
        reconcile(look(str(root), QUICK), notes)
    assert invoke("rollback", root).exit_code == 0
    assert step_of(root / "model_final.pt") == 300
    assert step_of(root / "G_200.pth") == step_of(root / "D_200.pth") == 200


def test_every_path_and_every_reason(root, invoke, document):
    """``known-good --all``, the JSON of it, and ``list --saves`` name all parts and the rule that joined them."""
    trained(root, TRAINERS["torchtune"], 500, 600)
    lines = invoke("known-good", root, "--all").stdout.splitlines()
    assert [Path(line).name for line in lines] == ["epoch_4", "recipe_state"]
    parts = document("known-good", root)[1]["save"]
    assert {(part["series"], part["role"], part["place"]) for part in parts} == {
        ("epoch_#", "model", "in place"),
        ("recipe_state", "optimizer", "kept"),
    }
    rows = document("list", root, "--saves")[1]["saves"]
    assert [save["good"] for save in rows] == [False, True, True, True, True]
    assert {part["rule"] for save in rows for part in save["parts"]} == {"save times"}
    assert invoke("list", root, "--saves").exit_code == 0


def test_prune_keeps_whole_saves(root, document):
    """Of the newest good saves every part stays, though each series has newer good ones."""
    trained(root, TRAINERS["HiFi-GAN"], 400, 600)
    done = document("prune", root, "--keep-last", "1", "--dry-run")[1]
    kept, removed = ({row["path"] for row in done[key]} for key in ("kept", "removed"))
    assert {f"{name}_00000{step}" for name in ("g", "do") for step in (200, 300)} <= kept
    assert removed == {"g_00000100", "do_00000100"}


def test_a_rule_keeps_whole_saves(root, document):
    """What keeps D of a save keeps its G, though the rule takes other saves of G; D is saved each second time."""
    notes = PassNotes()
    for step in range(100, 1000, 100):
        for name in "GD" if step % 200 == 0 else "G":
            save(root / f"{name}_{step}.pth", {"model": weights(step, name.lower()), "optimizer": optimizer(step)})
        reconcile(look(str(root), QUICK), notes)
    done = document("prune", root, "--keep-every", "300", "--dry-run")[1]
    kept = {row["path"] for row in done["kept"]}
    assert {f"{name}_{step}.pth" for name in "GD" for step in (200, 400, 600, 800)} <= kept
    assert "G_500.pth" not in kept


def test_a_training_that_begins_from_scratch_is_seen_by_the_numbers_in_its_names(root):
    """guided-diffusion, which counts nowhere else: the first save after the restart is one of the beginning."""
    notes = PassNotes()
    for step in (1000, 2000):
        TRAINERS["guided-diffusion"].save(root, step, frozenset())
        reconcile(look(str(root), QUICK), notes)
    view = look(str(root), QUICK)
    went_back_to = content_of(next(known_good_candidates(view)))
    before = {checkpoint.signature for checkpoint in view.checkpoints}
    TRAINERS["guided-diffusion"].save(root, 100, frozenset())
    reconcile(look(str(root), QUICK), notes)
    told, sick = find_fresh_start(look(str(root), QUICK), went_back_to, before)
    assert told
    assert sick is not None
    assert "from scratch" in sick.reason


@pytest.mark.parametrize("sick", ["d", "g", "gd"])
@pytest.mark.parametrize("numbered_every", [1, 2])
def test_two_fixed_names_go_back_together_where_one_held_equal_bytes_twice(
    root, invoke, document, sick, numbered_every
):
    """All of its weights are NaN, so two saves of it are the same bytes, and one content."""
    notes = PassNotes()
    for n in range(1, 7):
        for name in "gd":
            tensors = weights(n, name)
            if n > 4 and name in sick:
                tensors = {key: torch.full_like(tensor, torch.nan) for key, tensor in tensors.items()}
            save(root / f"latest_net_{name.upper()}.pth", tensors)
            if n % numbered_every == 0:
                save(root / f"{n}_net_{name.upper()}.pth", tensors)
        reconcile(look(str(root), QUICK), notes)
    planned, done = invoke("rollback", root, "--dry-run"), invoke("rollback", root)
    assert (planned.exit_code, done.exit_code) == (0, 0)
    plan = planned.stdout.splitlines()[0].replace("would go", "went").replace("would be used", "was used")
    assert plan == done.stdout.splitlines()[0].partition("; the report: ")[0]
    assert {step_of(root / f"latest_net_{name}.pth") for name in "GD"} == {4}
    assert sorted(path.name for path in root.glob("[0-9]*.pth")) == [
        f"{n}_net_{name}.pth" for n in range(numbered_every, 5, numbered_every) for name in "DG"
    ]
    again = document("rollback", root)[1]
    assert (again["quarantined"], again["given"]) == ([], [])


def restored(folder: Path) -> dict[str, int | None]:
    """The paths below a folder, with the step of what lies there."""
    return {path.relative_to(folder).as_posix(): step_of(path) for path in saved(folder)}


@pytest.mark.parametrize("poisoned", POISONED)
@pytest.mark.parametrize("name", TRAINERS)
def test_what_is_restored_is_one_whole_moment(root, tmp_path, invoke, document, name, poisoned):
    """All files of the known-good save and no others, each under the path that it has in the run."""
    trainer = TRAINERS[name]
    trained(root, trainer, *POISONED[poisoned])
    wanted = {path for path in trainer.resumes if name != "CycleGAN" or "latest" in path}
    out = tmp_path / "out"
    done = document("restore", root, "--to", out)[1]
    assert restored(out) == dict.fromkeys(wanted, 300)
    assert (Path(done["path"]).name, done["outcome"]) == (trainer.known_good, "good")
    known = document("known-good", root)[1]["save"]
    assert [{**part, "path": 0, "place": 0} for part in done["save"]] == [{**p, "path": 0, "place": 0} for p in known]
    parts = [Path(part["path"]) for part in done["save"]] or [Path(done["path"])]
    assert all(part.exists() and part.is_relative_to(out) for part in parts)
    lying = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    assert done["bytes"] == lying
    if done["step"] is not None:
        assert invoke("restore", root, "--to", tmp_path / "again", "--step", done["step"]).exit_code == 0
        assert restored(tmp_path / "again") == restored(out)


@pytest.mark.parametrize("name", TRAINERS)
def test_a_run_begun_from_a_replica_has_the_whole_moment(root, tmp_path, invoke, document, name):
    """Training goes on there from all files of the save."""
    trainer = TRAINERS[name]
    trained(root, trainer, *POISONED["one after the other"])
    place, new = tmp_path / "replica", tmp_path / "new"
    assert invoke("replicate", root, "--to", place).exit_code == 0
    done = document("restore", place, "--as-run", new)[1]
    wanted = {path for path in trainer.resumes if name != "CycleGAN" or "latest" in path}
    assert restored(new) == dict.fromkeys(wanted, 300)
    assert all(Path(part["path"]).is_relative_to(new) and Path(part["path"]).exists() for part in done["save"])
    assert Path(invoke("known-good", new).stdout.strip()).name == trainer.known_good


@pytest.mark.parametrize("force", [False, True])
def test_a_step_of_which_one_part_is_bad_is_refused_whole(root, tmp_path, invoke, force):
    """A good D is not handed out for the step at which G is bad; with ``--force`` both are."""
    trained(root, TRAINERS["VITS"], 400, 600)
    out = tmp_path / "out"
    done = invoke("restore", root, "--to", out, "--step", "400", *(["--force"] if force else []))
    assert done.exit_code == (ExitCode.GOOD if force else ExitCode.BAD)
    assert force or "G_400.pth is bad" in done.stderr
    assert (restored(out) if out.exists() else {}) == ({"G_400.pth": None, "D_400.pth": 400} if force else {})


def test_a_bad_save_can_be_looked_at_after_a_rollback(root, tmp_path, invoke):
    """Its files lie in the quarantine, and are one save there, too."""
    trained(root, TRAINERS["VITS"], 400, 600)
    assert invoke("rollback", root).exit_code == 0
    assert invoke("restore", root, "--to", tmp_path / "out", "--step", "400", "--force").exit_code == 0
    assert restored(tmp_path / "out") == {"G_400.pth": None, "D_400.pth": 400}


def test_a_part_that_no_place_has_whole_leads_to_the_save_before(root, tmp_path, invoke, caplog):
    """D of the newest save rotted, and so did its copy: the save before it is made, whole, and it is said."""
    trained(root, TRAINERS["VITS"], 600, 600)
    files = [path for path in root.rglob("*D_500.pth*") if path.is_file() and path.suffix != ".json"]
    for path in {path.stat().st_ino: path for path in files}.values():
        flip(path, new_times=True)
    done = invoke("restore", root, "--to", tmp_path / "out")
    assert done.exit_code == 0
    assert restored(tmp_path / "out") == {"G_400.pth": 400, "D_400.pth": 400}
    (said,) = (record.getMessage() for record in caplog.records if "could not be restored" in record.getMessage())
    assert said.startswith("ckptguard: D_500.pth of")
    assert "trying G_400.pth of" in said
    assert invoke("restore", root, "--to", tmp_path / "step", "--step", "500").exit_code == ExitCode.BAD
    assert not (tmp_path / "step").exists()


def test_a_save_of_several_files_is_no_file(root, tmp_path, invoke):
    """DEST that names a file is refused with what to say instead, and an optimizer alone is no save."""
    trained(root, TRAINERS["guided-diffusion"], 600, 600)
    refused = invoke("restore", root, "--to", tmp_path / "back.pt")
    assert refused.exit_code == ExitCode.USAGE
    assert "back.pt/" in refused.stderr
    assert not list(tmp_path.glob("back*"))
    assert restored_of(invoke, root, tmp_path / "back.pt/") == 3


def restored_of(invoke, root: Path, dest: Path) -> int:
    """How many files a restore to a folder makes."""
    assert invoke("restore", root, "--to", f"{dest}/").exit_code == 0
    return len(restored(dest))


def test_a_replica_of_no_whole_save_has_nothing_good(root, tmp_path, invoke):
    """G was always good, and D never: the run has nothing good, and neither has a replica of it."""
    trained(root, TRAINERS["VITS"], 600, 100)
    assert invoke("known-good", root).exit_code == ExitCode.NO_KNOWN_GOOD
    assert invoke("replicate", root, "--to", tmp_path / "replica").exit_code == 0
    assert invoke("known-good", tmp_path / "replica").exit_code == ExitCode.NO_KNOWN_GOOD


def test_a_pin_is_one_of_the_whole_save(root, invoke, document):
    """Whichever file is named: all of its save are pinned at once and let go at once, and what another pin holds
    stays."""
    trained(root, TRAINERS["VITS"], 600, 600)
    first = document("pin", root / "D_400.pth")[1]["pins"]
    assert [(one["series"], one["step"]) for one in first] == [("D_#.pth", 400), ("G_#.pth", 400)]
    assert invoke("pin", root / "G_500.pth").exit_code == 0
    assert document("prune", root, "--keep-last", "1", "--dry-run")[1]["removed"] == []
    assert invoke("unpin", root / "G_400.pth").exit_code == 0
    assert invoke("unpin", root / "D_400.pth").exit_code == ExitCode.NOT_FOUND
    held = {one["path"] for one in document("list", root)[1]["checkpoints"] if one["pins"]}
    assert held == {"G_500.pth", "D_500.pth"}


@pytest.mark.parametrize("poisoned", POISONED)
@pytest.mark.parametrize("name", ["VITS", "HiFi-GAN", "BasicSR", "torchtune"])
def test_what_stays_for_want_of_room_is_one_whole_save(root, invoke, name, poisoned):
    """All kept copies that may go are gone, and all files in place: known-good is the same save, whole."""
    trainer = TRAINERS[name]
    trained(root, trainer, *POISONED[poisoned])
    view = look(str(root), QUICK)
    held = held_copies(view)
    assert any(not one.held.stays for one in held)
    for one in held:
        if not one.held.stays:
            release(view.run, one.id)
    for path in saved(root):
        path.unlink()
    lines = invoke("known-good", root, "--all").stdout.splitlines()
    assert len(lines) > 1
    assert Path(lines[0]).name == trainer.known_good


FORMS = (
    "{part}_{step}.pth",
    "{part}{step:06d}.pt",
    "models/{part}_{step}.pth",
    "{part}-step={step}.ckpt",
    "{part}_{step:08d}",
)


@pytest.mark.parametrize("seed", range(12))
def test_a_whole_save_goes_to_the_trash_and_comes_back(root, tmp_path, document, seed):
    """However its files are called, and how many it has: all of it is there, or all of it in the trash; and a restore
    of its step gives all of its files."""
    chance = random.Random(seed)
    form, parts = FORMS[seed % len(FORMS)], ("net_g", "net_d", "ema")[: chance.randint(2, 3)]
    steps = range(100, 100 * chance.randint(5, 7), 100)
    notes, names = PassNotes(), {}
    for step in steps:
        names[step] = {form.format(part=part, step=step) for part in parts}
        for part in parts:
            state = {"model": weights(step, part), "optimizer": optimizer(step)}
            save(root / form.format(part=part, step=step), state)
        reconcile(look(str(root), QUICK), notes)
    document("prune", root, "--keep-last", str(keep := chance.randint(1, 3)))
    kept = max(keep, QUICK.keep_good)
    lying = {path.relative_to(root).as_posix() for path in saved(root)}
    assert lying == {name for step in steps[-kept:] for name in names[step]}
    assert sorted({id.step for id in list_trashed(open_run(str(root), QUICK))}) == list(steps[:-kept])
    for step in steps:
        out = tmp_path / f"out-{step}"
        document("restore", root, "--step", str(step), "--to", out)
        assert restored(out) == dict.fromkeys(names[step], step)


@pytest.mark.parametrize(
    "names", [("model{:06d}.pt", "opt{:06d}.pt"), ("{}_net.pth", "{}.state"), ("g_{:08d}", "do_{:08d}")]
)
@pytest.mark.parametrize("pass_between", [False, True])
def test_a_first_save_is_whole_at_once(root, document, names, pass_between):
    """Its files are one save before there is another that says which number counts, also if the first of them was
    judged alone."""
    notes = PassNotes()
    for name, state in zip(names, (weights(10, "net"), optimizer(10)), strict=True):
        save(root / name.format(10), state)
        if pass_between:
            reconcile(look(str(root), QUICK), notes)
    reconcile(look(str(root), QUICK), notes)
    assert {path.name for path, _, _ in together(document, root)} == {name.format(10) for name in names}


def together(document, run):
    """The files of the known-good save, with what joined them."""
    parts = document("known-good", run)[1]["save"]
    return [(Path(part["path"]).relative_to(run), part["rule"], part["behind"]) for part in parts]


@pytest.mark.parametrize("name", TRAINERS)
def test_a_plain_copy_of_a_run_has_the_same_saves(root, tmp_path, document, name):
    """``cp -r`` loses the times of the files. What was saved together is computed from the records, which hold them."""
    trained(root, TRAINERS[name], 999, 999)
    copy = tmp_path / "copy"
    shutil.copytree(root, copy, copy_function=shutil.copyfile)
    assert together(document, copy) == together(document, root)
    assert document("list", copy, "--saves")[1]["saves"] == document("list", root, "--saves")[1]["saves"]


@pytest.mark.parametrize("order", ["backwards", 1, 2])
@pytest.mark.parametrize("name", TRAINERS)
def test_a_copy_without_records_has_the_same_saves_or_says_what_it_lost(root, tmp_path, document, name, order):
    """In each of three orders of copying, numbers and counters join as before. A fixed name that only its times
    joined is joined with nothing, and what is left to do is named, and does it."""
    trained(root, TRAINERS[name], 999, 999)
    copy = tmp_path / "copy"
    shutil.copytree(root, copy, ignore=shutil.ignore_patterns("_ckptguard"))
    files = sorted((p for p in copy.rglob("*") if p.is_file()), key=lambda p: (p.stat().st_mtime, p))
    files.reverse() if order == "backwards" else random.Random(order).shuffle(files)
    for number, path in enumerate(files):
        os.utime(path, (1_700_100_000 + number / 1000,) * 2)
    reconcile(look(str(copy), QUICK), PassNotes())
    if "save times" not in {rule for _, rule, _ in together(document, root)}:
        assert together(document, copy) == together(document, root)
        return
    code, said = document("rollback", copy, "--force")
    assert code == ExitCode.NO_KNOWN_GOOD
    advice = shlex.split(said["error"]["hint"].partition("ckptguard ")[2])
    done = document(*advice, "--force")[1]
    assert {step_of(path) for path in saved(Path(done["known_good"]["path"]))} == {500}
