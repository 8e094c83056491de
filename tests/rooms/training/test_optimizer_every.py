"""`Saving(optimizer_every=k)`: full saves at every k-th, weights between. Nobody is led to weights while a full save is
good."""

import contextlib
import random
import shutil
import types
import warnings

import click.testing
import pytest
import safetensors.torch
import torch
from sharded_training import SETTINGS, digest, make, train
from support.faults import flip
from support.rank_processes import run_ranks
from support.runs import QUICK
from support.views import look

import ckptguard
from ckptguard.cli.entry import commands
from ckptguard.errors import NoKnownGoodError, SettingsError
from ckptguard.records.incidents import list_incidents
from ckptguard.records.kept import list_kept
from ckptguard.records.manifests import read_manifest
from ckptguard.records.run import open_run
from ckptguard.retention.prune import prune
from ckptguard.runs.find_known_good import Wanted, find_known_good, newest_candidate
from ckptguard.runs.history import load_history
from ckptguard.training.saving.saving import SaveQueue
from ckptguard.training.saving.stores import PreparedSave
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.upkeep.thin import thin
from ckptguard.values.ids import CheckpointId
from ckptguard.values.retention_policy import Policy
from ckptguard.values.verdict import Outcome
from ckptguard.verification.target import verify_target
from ckptguard.verification.user_decisions import reseal

SERIES = "step-#"


class OneRank:
    """The ranks of a training with one."""

    rank, size = 0, 1

    def any(self, value):
        return value

    def gather(self, value):
        return [value]

    def tell(self, value):
        return value


@pytest.mark.parametrize("seed", range(200))
def test_between_two_full_saves_that_stand_are_fewer_than_k(seed):
    """Saves that succeed or fail, in any order, drained or still in flight when the next is due, with loads between:
    the first after each load is full, no k saves in a row that stand are without the optimizer, and a full one that
    failed is made up for at once."""
    chance, made, written = random.Random(seed), [], []
    every = chance.randint(1, 5)

    def prepare(step, extra, *, copy=False, full=True):
        stands = chance.random() >= 0.3
        made.append((full, stands))

        def write(turn):
            if not stands:
                raise OSError("full")
            written.append(full)

        return PreparedSave(path=str(step), write=write)

    queue = SaveQueue(types.SimpleNamespace(prepare=prepare), lambda *_: None, OneRank())
    for step in range(60):
        due = not made or made[-1] == (True, False)
        if chance.random() < 0.1:
            queue.drain()
            queue.went_to(step)
            due = True
        with contextlib.suppress(OSError):
            queue.begin(step, {}, blocking=chance.random() < 0.5, full_every=every)
        assert made[-1][0] or not due
        if chance.random() < 0.5:
            queue.drain()
            assert True in written[-every:] or not written


def data(count=40):
    """Batches that are the same each time."""
    return [torch.randn(16, 8, generator=torch.Generator().manual_seed(n)) for n in range(count)]


def make_guard(run, *, settings=QUICK, strict=True, **saving):
    """A guard over a small model under AdamW, and the parts."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    saving = ckptguard.Saving(**{"optimizer_every": 3} | saving)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "strict": strict}
    return ckptguard.TrainingGuard(run, **parts, daemon="off", settings=settings, saving=saving), model, optimizer


def go(guard, model, optimizer, total, *, poison_at=None):
    """Train on; once, the model is poisoned at a step. Returns the steps made."""
    steps = []
    for step, batch in guard.steps(data(), total=total, save_every=2):
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == poison_at and steps.count(step) == 0:
            with torch.no_grad():
                next(iter(model.parameters())).fill_(float("nan"))
            loss = loss * float("nan")
        steps.append(step)
        guard.observe(loss=loss)
    guard.close()
    return steps


def kinds(run):
    """Of each step, whether its manifest says that it is full."""
    own = open_run(str(run))
    ids = load_history(own).sealed(SERIES)
    return {id.step: not read_manifest(own, id).thinned for id in sorted(ids, key=lambda id: id.order)}


@pytest.mark.parametrize("blocking", [True, False])
def test_every_third_save_is_full_and_all_are_good(tmp_path, blocking):
    """The files say it too; every one is good, and the weights of each load by safetensors and by torch."""
    guard, model, optimizer = make_guard(tmp_path / "run", blocking=blocking)
    go(guard, model, optimizer, 15)
    full = {0, 6, 12, 15}
    assert kinds(tmp_path / "run") == {step: step in full for step in (*range(0, 15, 2), 15)}
    report = verify_target(str(tmp_path / "run"), QUICK)
    assert {c.outcome for c in report.checkpoints} == {Outcome.GOOD}
    said = {c.path: [f.message for f in c.findings] for c in report.checkpoints}
    for step, whole in kinds(tmp_path / "run").items():
        folder = tmp_path / "run" / f"step-{step:09d}"
        assert (folder / "optimizer.safetensors").exists() == (whole and step > 0)
        assert any("a resume would restart: optimizer" in m for m in said[folder.name]) != whole
        model.load_state_dict(safetensors.torch.load_file(folder / "model.safetensors"))
        assert "model" in ckptguard.load(str(folder))


class TensorSchedule:
    """A schedule whose state is a tensor, which is stored in the file of the optimizer."""

    def __init__(self):
        self.rates = torch.ones(3)

    def state_dict(self):
        return {"rates": self.rates, "last_epoch": 3}

    def load_state_dict(self, state):
        self.rates = state["rates"]


def test_what_else_lies_in_the_file_of_the_optimizer_is_no_optimizer(tmp_path):
    """A save without the optimizer is resumable from all but that, although its file is there; a full one from all."""
    run, model = tmp_path / "run", torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    parts = {"model": model, "optimizer": optimizer, "scheduler": TensorSchedule()}
    saving = ckptguard.Saving(optimizer_every=2)
    go(ckptguard.TrainingGuard(run, **parts, daemon="off", settings=QUICK, saving=saving), model, optimizer, 5)
    verify_target(str(run), QUICK)
    history = load_history(open_run(str(run)))
    for step, full in kinds(run).items():
        assert (run / f"step-{step:09d}" / "optimizer.safetensors").exists()
        facts = history.verdict(CheckpointId(SERIES, step, 1)).facts
        assert "scheduler" in facts.resumable
        if step:  # before the first update there is no optimizer state
            assert ("optimizer" in facts.resumable, "optimizer" in facts.thinned) == (full, not full)


def test_rollback_after_nan_goes_to_the_last_full_one(tmp_path):
    """NaN at step 11: step 10 and 8 hold weights, so training goes on from 6, and ends finite and full."""
    guard, model, optimizer = make_guard(tmp_path / "run")
    steps = go(guard, model, optimizer, 14, poison_at=11)
    assert steps[:11] == list(range(1, 12))
    assert steps[11] == 7
    (incident,) = list_incidents(open_run(str(tmp_path / "run")))
    assert incident.known_good == "6.1"
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())
    assert kinds(tmp_path / "run")[14]


def test_known_good_prefers_full_ones_and_says_what_weights_would_lose(tmp_path):
    """Weights are named only when no full one is left, with the reason; a strict guard refuses, another one goes on,
    says what it lacks, and begins with an optimizer of no history."""
    run = tmp_path / "run"
    guard, model, optimizer = make_guard(run)
    go(guard, model, optimizer, 11)
    verify_target(str(run), QUICK)
    shutil.rmtree(run / "step-000000011")
    opened = open_run(str(run))
    assert find_known_good(opened).step == 6
    for step in (0, 6):
        flip(next((run / f"step-{step:09d}").glob("model*")), -3)
    verify_target(str(run), QUICK)
    with pytest.raises(NoKnownGoodError) as none:
        find_known_good(opened)
    assert "would restart its optimizer" in none.value.hint
    gated = click.testing.CliRunner().invoke(commands, ["gate", str(run)])
    assert gated.exit_code == 13
    assert "step-000000010 is good, but thinned" in gated.stderr
    assert "move them away" not in gated.stderr
    weights = newest_candidate(look(opened), Wanted(thinned=True))
    assert (weights.id.step, weights.answer.thinned) == (10, ("optimizer",))
    assert "a resume would restart: optimizer" in weights.answer.reason
    guard, *_ = make_guard(run)
    with pytest.raises(NoKnownGoodError) as none:
        guard.resume()
    assert "strict=False" in none.value.hint
    guard.close()
    guard, model, optimizer = make_guard(run, strict=False)
    optimizer.state[next(iter(model.parameters()))]["exp_avg"] = torch.full((8, 8), float("nan"))
    assert guard.resume() == 10
    assert "the checkpoint holds no state of the optimizer" in guard.missing_for_exact_resume
    assert not optimizer.state
    go(guard, model, optimizer, 12)
    assert kinds(run)[12]


def test_what_prune_thinned_is_resumed_from_as_what_was_saved_so(tmp_path):
    """A guard's full saves that lost their optimizer later: strict refuses, else the optimizer begins again."""
    run = tmp_path / "run"
    guard, model, optimizer = make_guard(run, optimizer_every=1)
    go(guard, model, optimizer, 8)
    verify_target(str(run), QUICK)
    settings = QUICK.changed(keep="none")
    done, troubles = thin(look(open_run(str(run)), settings), Policy(thin_after=1, keep_good=1))
    assert troubles == ()
    assert [one.path for one in done if one.files][-1] == "step-000000006"
    shutil.rmtree(run / "step-000000008")
    shutil.rmtree(run / "step-000000000")  # of it there was no optimizer to take
    guard, *_ = make_guard(run)
    with pytest.raises(NoKnownGoodError):
        guard.resume()
    guard.close()
    guard, model, optimizer = make_guard(run, strict=False)
    optimizer.state[next(iter(model.parameters()))]["exp_avg"] = torch.full((8, 8), float("nan"))
    assert guard.resume() == 6
    assert "the checkpoint holds no state of the optimizer" in guard.missing_for_exact_resume
    assert not optimizer.state
    guard.close()


def test_copies_and_rules_never_count_weights_as_the_full_ones_that_stay(tmp_path):
    """The newest two are weights: both protected copies are of full ones; keep_last=1 keeps two full ones besides."""
    run = tmp_path / "run"
    keeping = QUICK.changed(keep="link", keep_good=2)
    guard, model, optimizer = make_guard(run, settings=keeping)
    go(guard, model, optimizer, 11)
    shutil.rmtree(run / "step-000000011")
    opened = open_run(str(run))
    reconcile(look(opened, keeping), PassNotes())
    reconcile(look(opened, keeping), PassNotes())
    assert {0, 6} <= {id.step for id in list_kept(opened)}
    done = prune(look(opened, keeping), Policy(keep_last=1, keep_good=2), grace=0.0, dry_run=True)
    assert {d.checkpoint.id.step for d in done.decisions if d.keep} == {0, 6, 10}


@pytest.mark.parametrize("how", ["gone", "damaged", "saved over"])
def test_weights_of_which_a_copy_is_left_are_resumed_from_too(tmp_path, how):
    """No full one is good, and the weights in place are lost: strict=False takes their copy, which stays weights."""
    run, keeping = tmp_path / "run", QUICK.changed(keep="copy", keep_good=3)
    go(*make_guard(run, settings=keeping), 6)
    shutil.rmtree(run / "step-000000006")
    opened = open_run(str(run))
    for _ in range(2):
        reconcile(look(opened, keeping), PassNotes())
    for copy in (run / "_ckptguard" / "kept").rglob("000000000000.1"):
        shutil.rmtree(copy)
    flip(next((run / "step-000000000").glob("model*")), -3)
    for step in (2, 4):
        if how == "gone":
            shutil.rmtree(run / f"step-{step:09d}")
        else:
            flip(run / f"step-{step:09d}" / "model.safetensors", -3)
    if how == "saved over":
        shutil.rmtree(run / "step-000000004")
        shutil.copytree(run / "step-000000000", run / "step-000000004")
    verify_target(str(run), keeping)
    guard, *_ = make_guard(run, settings=keeping)
    with pytest.raises(NoKnownGoodError):
        guard.resume()
    guard.close()
    guard, *_ = make_guard(run, settings=keeping, strict=False)
    assert guard.resume() == 4
    assert "the checkpoint holds no state of the optimizer" in guard.missing_for_exact_resume
    guard.close()
    assert "step-000000004" in {c.path for c in look(opened).checkpoints}
    assert not kinds(run)[4]
    with pytest.raises(NoKnownGoodError):
        find_known_good(opened)


@pytest.mark.parametrize("every", [3, 1])
def test_weights_without_records_stay_weights(tmp_path, every):
    """All records are lost, and every save is sealed again, those that were thinned later too: known-good is a full
    one, as before."""
    run = tmp_path / "run"
    go(*make_guard(run, optimizer_every=every), 11)
    verify_target(str(run), QUICK)
    if every == 1:
        thin(look(open_run(str(run)), QUICK.changed(keep="none")), Policy(thin_after=3, keep_good=1))
    before = kinds(run)
    shutil.rmtree(run / "_ckptguard")
    for step in before:
        reseal(look(open_run(str(run))), f"step-{step:09d}")
    shutil.rmtree(run / "step-000000011")
    assert kinds(run) == before
    opened, newest = open_run(str(run)), max(step for step, full in before.items() if full and step < 11)
    assert find_known_good(opened).step == newest
    assert load_history(opened).verdict(CheckpointId(SERIES, 2, 1)).facts.thinned == ("optimizer",)
    guard, *_ = make_guard(run)
    assert guard.resume() == newest
    guard.close()


def test_what_it_may_be():
    """Only whole numbers from 1 on, and only in our own layout."""
    for wrong in (0, -1, 1.5, True, "2", None):
        with pytest.raises(SettingsError):
            ckptguard.Saving(optimizer_every=wrong)


def test_files_of_the_users_own_refuse_it(tmp_path):
    """What they hold is for the user's own save to say."""
    model = torch.nn.Linear(2, 1)
    with pytest.raises(SettingsError, match="optimizer_every"):
        ckptguard.TrainingGuard(
            tmp_path / "run",
            model=model,
            save=lambda path, step: None,
            load=lambda path: None,
            daemon="off",
            saving=ckptguard.Saving(optimizer_every=2),
        )


def train_ranks(kind, folder, blocking):
    """A guarded training of several ranks; at step 11 rank 1 is poisoned. What this rank saw."""
    model, optimizer, scheduler = make(kind)
    saving = ckptguard.Saving(optimizer_every=3, blocking=blocking)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    guard = ckptguard.TrainingGuard(folder, **parts, daemon="off", settings=SETTINGS, saving=saving)
    steps, first = [], True
    for step, _ in guard.steps([torch.zeros(1)] * 40, total=13, save_every=2):
        train(model, optimizer, scheduler, step, step)
        loss = 1.0
        if step == 11 and first and torch.distributed.get_rank() == 1:
            loss = float("nan")
            with torch.no_grad():
                next(iter(model.parameters())).fill_(loss)
        first = first and step != 11
        steps.append(step)
        guard.observe(loss=loss)
    ended = digest(model, optimizer)
    guard.close()
    return [steps, ended]


def resume_ranks(folder, strict):
    """Resume, and return the step, what is missing, or the error's hint."""
    model, optimizer, scheduler = make("ddp")
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "strict": strict}
    guard = ckptguard.TrainingGuard(folder, **parts, daemon="off", settings=SETTINGS)
    try:
        return [guard.resume(), list(guard.missing_for_exact_resume), len(optimizer.state)]
    except ckptguard.CkptguardError as error:
        return [type(error).__name__, error.hint]
    finally:
        guard.close()


@pytest.mark.torch
@pytest.mark.parametrize("blocking", [True, False])
def test_two_ranks_do_the_same(tmp_path, blocking):
    """DDP over gloo: every third save is full, both go back to the full one at 6, weights load by torch, and what is
    left of a run without a good full one is resumed only with strict=False."""
    from torch.distributed.checkpoint import FileSystemReader, load

    run = tmp_path / "run"
    ended = run_ranks(train_ranks, "ddp", str(run), blocking)
    for code, _, err in ended:
        assert code == 0, err
    (steps, one), (_, other) = (answer for _, answer, _ in ended)
    assert (steps[10:12], one) == ([11, 7], other)
    assert {step: full for step, full in kinds(run).items() if step <= 6} == {0: True, 2: False, 4: False, 6: True}
    assert kinds(run)[13]
    report = verify_target(str(run), SETTINGS)
    assert {c.outcome for c in report.checkpoints} == {Outcome.GOOD}
    held = FileSystemReader(str(run / "step-000000004")).read_metadata().state_dict_metadata
    assert not any(name.startswith("optimizer") for name in held)
    model, *_ = make("plain")
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process loads alone
        load(state, checkpoint_id=str(run / "step-000000004"))
    thin = {step for step, full in kinds(run).items() if not full}
    for step in kinds(run).keys() - thin:
        shutil.rmtree(run / f"step-{step:09d}", ignore_errors=True)
    shutil.rmtree(run / "_ckptguard" / "kept", ignore_errors=True)
    strict = [answer for _, answer, _ in run_ranks(resume_ranks, str(run), True)]
    assert any("strict=False" in str(answer[1]) for answer in strict)
    loose = [answer for _, answer, _ in run_ranks(resume_ranks, str(run), False)]
    for answer in loose:
        assert answer[0] == max(thin)
        assert "the checkpoint holds no state of the optimizer" in answer[1]
        assert answer[2] == 0
