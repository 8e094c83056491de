"""`keep_bytes`: after it there is a full good one, nothing pinned went, and least valuable went first, or words say why
not."""

import json
import os
import random

import click.testing
import msgspec
import pytest
from support.layouts import WRITERS
from support.runs import QUICK
from support.views import look

from ckptguard.cli.entry import commands
from ckptguard.decisions.budget import Space, cut_to_budget, shares
from ckptguard.decisions.retention import Present, decide
from ckptguard.errors import SettingsError, StorageError
from ckptguard.records.pins import pin_checkpoint
from ckptguard.records.run import open_run
from ckptguard.retention.space import measure_space
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.runs.history import History
from ckptguard.upkeep.budget import SharedBudget, prune_and_thin
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.upkeep.thin import thin
from ckptguard.values.byte_sizes import parse_size
from ckptguard.values.ids import CheckpointId
from ckptguard.values.retention_policy import Best, Policy
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome

NONE = QUICK.changed(keep="none")
OUTCOMES = [Outcome.GOOD] * 6 + [Outcome.BAD, Outcome.SUSPECT, Outcome.PENDING, Outcome.INCOMPLETE]
DAY = 86400.0


def generated(seed):
    """A run of saves with verdicts, pins, hard links, metrics, saves of several, a policy and a budget."""
    chance = random.Random(seed)
    present, in_place, named, sizes, thins = [], {}, {}, {}, {}
    base = ("base", chance.randint(0, 50))
    for series in ("a", "b")[: chance.randint(1, 2)]:
        for step in range(chance.randint(1, 14)):
            path = f"{series}-{step}"
            weights, state = (path, "w"), (path, "o")
            thinned = chance.random() < 0.2
            files = {weights} if thinned else {weights, state}
            if chance.random() < 0.3:
                files.add(base)  # a frozen part that several link
                sizes[base] = base[1]
            sizes[weights], sizes[state] = chance.randint(1, 60), 0 if thinned else chance.randint(1, 120)
            present.append(
                Present(
                    path=path,
                    id=CheckpointId(series, step, 1),
                    outcome=chance.choice(OUTCOMES) if chance.random() < 0.5 else Outcome.GOOD,
                    saved=chance.choice([None, step * DAY, chance.random() * 9 * DAY]),
                    metrics={"loss": chance.random()} if chance.random() < 0.7 else {},
                    holds=("pinned",) if chance.random() < 0.1 else (),
                    thinned=thinned,
                )
            )
            in_place[path] = files
            for file in files:
                named[f"{path}/{file[1]}"] = file
            if not thinned and chance.random() < 0.6:
                thins[path] = (f"{path}/o",)
    held = {file for file in sizes if chance.random() < 0.05}
    trash = {("trash", n): chance.randint(1, 99) for n in range(chance.randint(0, 3))}
    policy = Policy(
        keep_last=chance.choice([None, 1, 3]),
        keep_every=chance.choice([None, 4]),
        keep_best=chance.choice([(), (Best("loss", "min", 2),)]),
        keep_good=chance.randint(1, 3),
        drop_failed=chance.random() < 0.2,
        keep_bytes=chance.randint(1, 1500),
    )
    space = Space(sizes=sizes | trash, in_place=in_place, named=named, held=held)
    saves = []
    if len({one.id.series for one in present}) == 2 and chance.random() < 0.5:
        steps = {one.id.step for one in present if one.id.series == "a"}
        steps &= {one.id.step for one in present if one.id.series == "b"}
        saves = [frozenset(CheckpointId(series, step, 1) for series in "ab") for step in steps]
    return present, space, policy, saves, thins


def newest_full(present, series, count):
    """The newest good ones of a series that hold an optimizer, by a sort of this test's own."""
    full = [p for p in present if p.id.series == series and p.outcome is Outcome.GOOD and not p.thinned]
    return {p.path for p in sorted(full, key=lambda p: -p.id.step)[:count]}


def bytes_of(space, paths, taken=()):
    """What is left if these stay, counted file by file."""
    files = {file for path in paths for file in space.in_place[path]} | set(space.held)
    return sum(space.sizes[file] for file in files if file not in taken or file in space.held)


@pytest.mark.parametrize("chunk", range(20))
def test_after_the_budget_the_laws_hold(chunk):
    """Against what this test counts itself, for 2,000 generated runs."""
    for seed in range(chunk * 100, chunk * 100 + 100):
        present, space, policy, saves, thins = generated(seed)
        ruled = decide(present, policy, saves=saves)
        will_thin = {path: dict.fromkeys(files) for path, files in thins.items()}
        decisions, budget = cut_to_budget(ruled, space, policy, saves=saves, will_thin=will_thin)
        before = {d.checkpoint.path: d for d in ruled if d.keep}
        after = {d.checkpoint.path for d in decisions if d.keep}
        by_path, gone = {p.path: p for p in present}, before.keys() - after
        assert after <= before.keys(), seed
        for path in gone:
            one = by_path[path]
            assert one.outcome is Outcome.GOOD, seed
            assert not one.holds, seed
            newer = [p for p in present if p.id.series == one.id.series and p.id.step > one.id.step]
            assert all(p.outcome is not Outcome.PENDING for p in newer), seed
        for series in {p.id.series for p in present}:
            assert newest_full(present, series, policy.keep_good) <= after, seed
            good = [p for p in present if p.id.series == series and p.outcome is Outcome.GOOD]
            newest = max(good, key=lambda p: p.id.step).path if good else None
            assert newest not in gone, seed
        for save in saves:
            own = {p.path for p in present if p.id in save and p.outcome is Outcome.GOOD and p.path in before}
            assert own <= after or not own & after, seed
        taken = {space.named[name] for path in budget.to_thin for name in thins[path]}
        left = bytes_of(space, after, taken)
        assert left == budget.after, seed
        assert (left <= policy.keep_bytes) == (budget.why == ""), seed
        assert budget.used == sum(space.sizes.values()), seed
        assert set(budget.to_thin) <= after & thins.keys(), seed
        possible = {space.named[name] for path, names in thins.items() if path in after for name in names}
        if gone:  # all that may be thinned was not enough for what was there before the last went
            every = {space.named[name] for path, names in thins.items() if path in before for name in names}
            assert bytes_of(space, before, every) > policy.keep_bytes, seed
        if budget.why:
            assert bytes_of(space, after, possible) == left, seed
        if not saves:
            may = [d for d in ruled if d.checkpoint.path in gone]
            for victim in may:
                older = victim.checkpoint
                for other in ruled:
                    one = other.checkpoint
                    if one.path not in after or one.holds or one.outcome is not Outcome.GOOD:
                        continue
                    same = one.id.series == older.id.series and other.reasons == victim.reasons
                    if same and one.id.step < older.id.step and not space.in_place[one.path] <= set(space.held):
                        held_back = any(
                            p.outcome is Outcome.PENDING and p.id.series == one.id.series and p.id.step > one.id.step
                            for p in present
                        )
                        assert held_back, (seed, one.path, older.path)


@pytest.mark.parametrize("seed", range(300))
def test_runs_of_a_fleet_share_a_budget(seed):
    """Against a search for the level at which the cut runs add up to the total: nobody gets less than an equal part."""
    chance = random.Random(seed)
    uses = {f"/run{n}": chance.randint(0, 10 ** chance.randint(1, 12)) for n in range(chance.randint(1, 30))}
    total = chance.randint(1, max(2, 2 * sum(uses.values())))
    found = shares(uses, total)
    assert found.keys() == uses.keys()
    assert sum(min(use, found[run]) for run, use in uses.items()) <= total
    assert all(share >= total // len(uses) for share in found.values())
    if sum(uses.values()) <= total:
        assert all(found[run] >= use for run, use in uses.items())
        return
    low, high = 0, total
    while low < high:
        level = (low + high + 1) // 2
        low, high = (level, high) if sum(min(use, level) for use in uses.values()) <= total else (low, level - 1)
    for run, use in uses.items():
        assert min(use, found[run]) == pytest.approx(min(use, low), abs=len(uses))


def test_passes_of_two_runs_keep_their_shared_budget(tmp_path):
    """The larger run gives until both together fit; the smaller one loses nothing."""
    roots, shared = {"small": range(100, 400, 100), "large": range(100, 1100, 100)}, None
    for name, steps in roots.items():
        (tmp_path / name).mkdir()
        make(tmp_path / name, steps)
    sizes = {name: disk_bytes(tmp_path / name) for name in roots}
    shared = SharedBudget(int(sizes["small"] * 2.5))
    settings = NONE.changed(trash_grace=0.0)
    notes = {name: PassNotes(shared=shared) for name in roots}
    for _ in range(14):
        for name in roots:
            notes[name].prune_at = 0.0
            assert reconcile(look(open_run(str(tmp_path / name)), settings), notes[name]).could_not_tell == ()
    now = {name: disk_bytes(tmp_path / name) for name in roots}
    assert now["small"] == sizes["small"]
    assert sum(now.values()) <= shared.total
    assert find_known_good(open_run(str(tmp_path / "large"))).step == 1000


def make(root, steps, settings=NONE):
    """A verified run of Trainer folders."""
    paths = {step: WRITERS["trainer"](root, step, step) for step in steps}
    reconcile(look(open_run(str(root)), settings), PassNotes())
    return paths


def disk_bytes(root):
    """What the disk says of everything in place and in the copies and the trash, each inode once."""
    found = {}
    for folder, _, names in os.walk(root):
        relative = os.path.relpath(folder, root).split(os.sep)
        if relative[0] == "_ckptguard" and (len(relative) < 2 or relative[1] not in ("kept", "trash", "quarantine")):
            continue
        for name in names:
            info = os.lstat(os.path.join(folder, name))
            found[info.st_ino] = info.st_blocks * 512
    return sum(found.values())


def test_what_is_measured_is_what_the_disk_says(root):
    """Copies by hard link count once, the trash counts, and a name outside of the run keeps its bytes."""
    paths = make(root, (100, 200, 300, 400), QUICK.changed(keep="link"))
    run = open_run(str(root))
    view = look(run, QUICK.changed(keep="link"))
    space = measure_space(view, {c.path for c in view.checkpoints})
    assert sum(space.sizes.values()) == disk_bytes(root)
    assert space.total(space.held) > 0
    outside = root.parent / "outside"
    os.link(root / paths[100] / "optimizer.pt", outside)
    before = space.total(space.held)
    space = measure_space(look(run), {c.path for c in view.checkpoints})
    assert space.total(space.held) == before + os.lstat(outside).st_blocks * 512
    prune_and_thin(look(run, NONE), Policy(keep_bytes=1), grace=DAY)
    view = look(run, NONE)
    space = measure_space(view, {c.path for c in view.checkpoints})
    assert sum(space.sizes.values()) == disk_bytes(root)


def test_it_thins_then_prunes_and_the_plan_is_what_is_done(root):
    """A dry run names what goes; then exactly that goes, and known-good stays. With the grace over, the disk agrees."""
    paths = make(root, range(100, 900, 100))
    run = open_run(str(root))
    pin_checkpoint(run, CheckpointId("checkpoint-#", 200, 1), reason="user")
    whole = disk_bytes(root)
    for share in (0.9, 0.6, 0.3, 0.01):
        policy = Policy(keep_bytes=int(whole * share))
        plan = prune_and_thin(look(run, NONE), policy, grace=DAY, dry_run=True)
        assert plan.dry_run
        done = prune_and_thin(look(run, NONE), policy, grace=DAY)
        assert [d.checkpoint.path for d in plan.removed] == [d.checkpoint.path for d in done.removed]
        assert [one.path for one in plan.thinned] == [one.path for one in done.thinned]
        assert done.could_not_tell == ()
        assert {paths[200], paths[700], paths[800]} <= {d.checkpoint.path for d in done.decisions if d.keep}
        assert find_known_good(run).step == 800
        again = prune_and_thin(look(run, NONE), policy, grace=DAY)
        assert (again.removed, again.thinned) == ((), ())  # what waits in the trash makes no more go
        assert bool(again.budget.in_trash) == bool(done.removed or done.thinned)
        emptied = prune_and_thin(look(run, NONE), policy, grace=0.0)
        assert emptied.budget.after == done.budget.after
        assert disk_bytes(root) == done.budget.after
        assert (done.budget.after <= policy.keep_bytes) == (not done.budget.why)
    assert "one of the newest 2 good ones" in done.budget.why
    assert f"{paths[200]} (" in done.budget.why


def test_a_pass_keeps_the_budget_of_the_settings(root):
    """Pass after pass thins one, then prunes what is left over, and then does nothing."""
    make(root, range(100, 900, 100))
    run = open_run(str(root))
    settings = NONE.changed(keep_bytes=str(disk_bytes(root) // 2), trash_grace=0.0)
    notes = PassNotes()
    for _ in range(12):
        notes.prune_at = 0.0
        done = reconcile(look(run, settings), notes)
        assert done.could_not_tell == ()
    assert (done.pruned, done.thinned) == ((), ())
    assert disk_bytes(root) <= float(settings.keep_bytes)
    assert find_known_good(run).step == 800


def test_below_its_budget_a_run_is_not_read_for_it(root, monkeypatch):
    """A pass reads as many manifests as for another rule, however many checkpoints there are."""
    make(root, range(100, 1300, 100))
    run, read, counts = open_run(str(root)), History.manifest, [0]

    def counted(history, id):
        counts[-1] += 1
        return read(history, id)

    monkeypatch.setattr(History, "manifest", counted)
    for settings in (NONE.changed(keep_last=100), NONE.changed(keep_bytes=disk_bytes(root))):
        notes = PassNotes()
        reconcile(look(run, settings), notes)
        notes.prune_at = 0.0
        counts.append(0)
        assert reconcile(look(run, settings), notes).could_not_tell == ()
        counts.append(0)
    assert counts[1] == counts[3]


@pytest.mark.parametrize("records", ["manifests/*/*.json", "format.json"])
def test_a_run_that_cannot_be_read_holds_up_no_other_of_its_fleet(tmp_path, records):
    """Its error is said, nothing of it goes, and the other one keeps the budget."""
    for name in ("broken", "whole"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        make(tmp_path / "runs" / name, range(100, 900, 100))
    for record in (tmp_path / "runs" / "broken" / "_ckptguard").glob(records):
        record.chmod(0o600)
        record.write_bytes(b"damaged")
    before = disk_bytes(tmp_path / "runs" / "broken")
    total = disk_bytes(tmp_path / "runs" / "whole") // 2
    file = tmp_path / "fleet.toml"
    file.write_text(f'folders = ["runs"]\nkeep_bytes = {total}\n[settings]\nkeep = "none"\ntrash_grace = 0.0\n')
    for _ in range(2):
        done = click.testing.CliRunner().invoke(commands, ["fleet", "prune", str(file)])
        assert done.exit_code == 1
        assert "broken" in done.stderr
    assert disk_bytes(tmp_path / "runs" / "broken") == before
    assert disk_bytes(tmp_path / "runs" / "whole") <= total


def test_what_could_not_be_thinned_just_now_is_not_pruned_instead(root, monkeypatch):
    """A read fails while one is thinned. Until it is tried again nothing whole goes that thinning would spare."""
    make(root, range(100, 900, 100))
    run = open_run(str(root))
    settings = NONE.changed(keep_bytes=str(disk_bytes(root) * 8 // 10), trash_grace=0.0)
    notes, thins = PassNotes(), prune_and_thin(look(run), settings.retention(), grace=0.0, dry_run=True)
    assert thins.thinned
    assert not thins.removed
    with monkeypatch.context() as fault:
        fault.setattr("ckptguard.upkeep.thin.read_what_stays", raises(StorageError("the disk did not answer", key="")))
        assert any("did not answer" in one for one in reconcile(look(run, settings), notes).could_not_tell)
    for _ in range(3):
        notes.prune_at = 0.0
        done = reconcile(look(run, settings), notes)
        assert (done.pruned, done.thinned) == ((), ())
    for _ in range(12):
        notes.prune_at = notes.thin_at = 0.0
        assert reconcile(look(run, settings), notes).pruned == ()
    assert disk_bytes(root) <= float(settings.keep_bytes)


def raises(error):
    """A function that raises this."""

    def act(*_, **__):
        raise error

    return act


def test_thinning_takes_nothing_where_it_frees_nothing(root):
    """What would go of the oldest has a name outside of the run: they stay whole, in a plan and in a pass."""
    make(root, range(100, 900, 100))
    run, thinned = open_run(str(root)), thin(look(open_run(str(root))), Policy(thin_after=2), dry_run=True)[0]
    old = [one.path for one in thinned[:3]]
    for number, file in enumerate(file for one in thinned[:3] for file in one.files):
        os.link(root / file, root.parent / f"outside-{number}")
    settings = NONE.changed(keep_bytes=str(disk_bytes(root) * 9 // 10), trash_grace=0.0)
    plan = prune_and_thin(look(run), settings.retention(), grace=0.0, dry_run=True)
    assert plan.thinned
    assert not plan.removed
    assert not {one.path for one in plan.thinned} & set(old)
    notes = PassNotes()
    for _ in range(8):
        notes.prune_at = 0.0
        reconcile(look(run, settings), notes)
    assert all((root / path / "optimizer.pt").exists() for path in old)


@pytest.mark.parametrize(
    ("text", "bytes"),
    [("2TB", 2 * 10**12), ("500GiB", 500 * 2**30), ("1.5k", 1500), (7, 7), (2e12, 2 * 10**12), ("3 MB", 3 * 10**6)],
)
def test_sizes_are_read_as_people_write_them(text, bytes):
    """One parser for settings, options and rates."""
    assert parse_size(text) == bytes
    assert Settings(keep_bytes=text).retention().keep_bytes == bytes


@pytest.mark.parametrize("text", ["", "2XB", "-1", "0", "TB", "1e400", "nan", "inf", "9" * 40])
def test_no_size_is_refused(text):
    """With a sentence of ours."""
    with pytest.raises(SettingsError):
        Settings(keep_bytes=text)
    assert msgspec.structs.replace(Settings(), keep_bytes=None).retention().keep_bytes is None


def test_a_fleet_is_pruned_as_its_plan_says(tmp_path):
    """`fleet prune` names what goes of each run, then does exactly that. The larger run gives; JSON says the same."""
    for name, steps in {"small": range(100, 400, 100), "large": range(100, 1100, 100)}.items():
        (tmp_path / "runs" / name).mkdir(parents=True)
        make(tmp_path / "runs" / name, steps)
    total = int(2.5 * disk_bytes(tmp_path / "runs" / "small"))
    file = tmp_path / "fleet.toml"
    file.write_text(f'folders = ["runs"]\nkeep_bytes = {total}\n[settings]\nkeep = "none"\ntrash_grace = 0.0\n')

    def prunes(*options):
        done = click.testing.CliRunner().invoke(commands, ["fleet", "prune", str(file), *options])
        assert (done.exit_code, done.stderr) == (0, "")
        return done.stdout

    before = disk_bytes(tmp_path)
    planned = {one["run"]: one for one in json.loads(prunes("--dry-run", "--json"))["runs"]}
    assert disk_bytes(tmp_path) == before
    text = prunes("--dry-run")
    large, small = (planned[str(tmp_path / "runs" / name)] for name in ("large", "small"))
    assert (small["removed"], small["thinned"]) == ([], [])
    assert all(f"  {one['path']} (" in text for one in large["removed"])
    done = {one["run"]: one for one in json.loads(prunes("--json"))["runs"]}
    for run, plan in planned.items():
        for key in ("removed", "thinned"):
            assert [one["path"] for one in done[run][key]] == [one["path"] for one in plan[key]]
    prunes()  # which empties the trash
    assert disk_bytes(tmp_path / "runs" / "small") + disk_bytes(tmp_path / "runs" / "large") <= total
    refused = click.testing.CliRunner().invoke(commands, ["fleet", "prune", str(file), "--shard", "1/2"])
    assert refused.exit_code == 2
