"""Several ranks save, load and go back together: what one cannot do none does, and what is saved comes back bit for
bit, also onto other numbers of ranks."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from sharded_training import guarded, load_and_go_on, load_into_another, make, save_and_go_on
from support.rank_processes import run_ranks
from support.views import look

import ckptguard
from ckptguard.errors import CkptguardError
from ckptguard.records.manifests import read_manifest
from ckptguard.records.run import open_run
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.upkeep.thin import thin
from ckptguard.values.ids import CheckpointId
from ckptguard.values.retention_policy import Policy
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome
from ckptguard.verification.target import verify_target

pytestmark = pytest.mark.torch
ON_CPU = hasattr(torch.cpu.Stream, "record_event")
needs_fsdp2 = pytest.mark.skipif(not ON_CPU, reason="this torch has FSDP2 for accelerators alone")


def answers(function, *arguments, ranks=2):
    """What it returned on each rank."""
    ended = run_ranks(function, *arguments, ranks=ranks)
    for code, _, err in ended:
        assert code == 0, err
    return [answer for _, answer, _ in ended]


def train_files(folder, broken_at):
    """A loop whose save writes on rank 0 only; at one step that of rank 1 fails. What each rank saw."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = []

    def save(path, step):
        calls.append(os.path.basename(path))
        if rank == 1 and step == broken_at:
            raise OSError("no space left for rank 1")
        if rank == 0:
            torch.save({"model": model.state_dict(), "step": step}, path)

    def load(path):
        model.load_state_dict(torch.load(path, weights_only=True)["model"])

    guard = ckptguard.TrainingGuard(
        folder, model=model, optimizer=optimizer, save=save, load=load, daemon="off", settings=Settings(settle=0.0)
    )
    for step, batch in guard.steps([torch.full((1, 2), rank + 1.0)] * 8, total=4, save_every=2):
        model(batch).sum().backward()
        optimizer.step()
        guard.observe()
        made = step
    guard.save(5, metrics={"loss": 1.5 + rank})
    told = None
    try:
        guard.save(6)
    except CkptguardError as error:
        told = error.message
    resumed = guard.resume()
    return [made, calls, told, resumed, sorted(n for n in os.listdir(folder) if n.endswith(".pt"))]


def test_a_rank_that_cannot_save_its_own_files_is_told_of_on_all(tmp_path):
    """Nothing is left of that save; the others are there, and all ranks resume at the same one."""
    for step, calls, told, resumed, files in answers(train_files, str(tmp_path), 6):
        assert calls == ["step-0.pt", "step-2.pt", "step-4.pt", "step-5.pt", "step-6.pt"]
        assert "no space left for rank 1" in told
        assert (step, resumed, files) == (4, 5, ["step-0.pt", "step-2.pt", "step-4.pt", "step-5.pt"])
    run = open_run(str(tmp_path))
    assert read_manifest(run, CheckpointId("step-#.pt", 5, 1)).metrics == {"loss": 1.5}  # those of rank 0


@pytest.mark.parametrize("kind", [pytest.param("fsdp2", marks=needs_fsdp2), "ddp"])
@pytest.mark.parametrize("step", [3, 0])
def test_a_sharded_save_is_good_and_comes_back(kind, step, tmp_path):
    """Saved by two ranks, verified GOOD, and loaded over another state: what follows is the same, bit for bit."""
    folder = str(tmp_path / "run")
    saved = answers(save_and_go_on, kind, folder, step)
    assert saved[0][2] == ["good", "writer", []]
    assert not [p.name for p in (tmp_path / "run").iterdir() if p.name.startswith("tmp-")]
    manifest = read_manifest(open_run(folder), CheckpointId("step-#", step, 1))
    held = [t for file in manifest.files for t in file.tensors if t.dtype == "float32" and t.span is not None]
    assert held
    assert [t for t in held if None in (t.largest, t.rms, t.zeros)] == []
    loaded = answers(load_and_go_on, kind, folder, step)
    for rank in (0, 1):
        assert loaded[rank] == [*saved[rank][:2], f"rank {rank}"]


@pytest.mark.parametrize("kind", [pytest.param("fsdp2", marks=needs_fsdp2), "ddp"])
def test_a_sharded_save_is_thinned(kind, tmp_path):
    """Its files are written anew without the optimizer; the weights are the same, bit for bit, and the save is good."""
    folder, settings = str(tmp_path / "run"), Settings(settle=0.0, keep="none", keep_good=1)
    for step in (2, 4):
        answers(save_and_go_on, kind, folder, step)
    reconcile(look(open_run(folder), settings), PassNotes())
    before = ckptguard.load(folder, step=2)
    [done], troubles = thin(look(open_run(folder), settings), Policy(thin_after=1, keep_good=1))
    assert troubles == ()
    assert any(path.endswith(".metadata") for path in done.anew)
    assert verify_target(folder, settings).outcome is Outcome.GOOD
    after = ckptguard.load(folder, step=2)
    assert "optimizer" in before
    assert "optimizer" not in after
    assert before["model"].keys() == after["model"].keys()
    assert all(torch.equal(after["model"][name], value) for name, value in before["model"].items())


def test_names_that_do_not_fit(tmp_path):
    """They are refused, as for one process; without `strict` the rest is loaded, and they are told of."""
    folder = str(tmp_path / "run")
    answers(save_and_go_on, "ddp", folder, 3)
    [refused, _] = answers(load_into_another, folder, 3, True)
    assert refused[0] == "state"
    assert "4.bias is missing in it (2 missing, 2 unexpected)" in refused[1]
    first, second = answers(load_into_another, folder, 3, False)
    assert first[:2] == second[:2] == [["4.bias", "4.weight"], ["3.bias", "3.weight"]]
    assert first[2] == second[2]


@needs_fsdp2
def test_another_number_of_ranks_loads_it(tmp_path):
    """One, three and four ranks load what two saved; what belonged to a rank is not guessed."""
    folder = str(tmp_path / "run")
    saved = answers(save_and_go_on, "fsdp2", folder, 3)
    for ranks in (1, 3, 4):
        for loaded in answers(load_and_go_on, "fsdp2", folder, 3, ranks=ranks):
            assert loaded[0] == saved[0][0]
            assert loaded[2] is None


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp2", marks=needs_fsdp2)])
def test_a_run_goes_on_with_one_rank_and_with_two_again(kind, tmp_path):
    """Under a launcher and, for what is not sharded, without one; every save is as good as those before."""
    folder = str(tmp_path / "run")
    for ranks, total in ((2, 4), (1, 8), (2, 12)):
        for answer in answers(guarded, kind, folder, total, "", ranks=ranks):
            assert answer["steps"] == [*range(total - 3, total + 1)], answer
    if kind == "ddp":
        model, optimizer, scheduler = make("plain")
        guard = ckptguard.TrainingGuard(
            folder, model=model, optimizer=optimizer, scheduler=scheduler, daemon="off", settings=Settings(settle=0.0)
        )
        assert guard.resume() == 12
        guard.save(step=13)
        assert guard.resume() == 13
    report = verify_target(folder, Settings(settle=0.0))
    assert {one.path: one.outcome for one in report.checkpoints if one.outcome is not Outcome.GOOD} == {}


def test_several_ranks_do_not_go_on_from_a_save_of_one_alone(tmp_path):
    """The names of optimizer state differ, so that every later save would be suspect: a sentence says what to do."""
    model, optimizer, scheduler = make("plain")
    with ckptguard.TrainingGuard(
        tmp_path / "run", model=model, optimizer=optimizer, scheduler=scheduler, daemon="off"
    ) as guard:
        guard.save(step=2)
    for answer in answers(guarded, "ddp", str(tmp_path / "run"), 4, ""):
        assert answer["steps"] == []
        assert "was saved by one rank alone: several ranks cannot go on from it" in answer["message"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What trainings that nothing happened to end as."""
    return {
        kind: answers(guarded, kind, str(tmp_path_factory.mktemp(kind) / "run"), 9, "")[0]["digest"]
        for kind in (("ddp", "fsdp2") if ON_CPU else ("ddp",))
    }


@pytest.mark.parametrize(
    ("kind", "trouble"),
    [("ddp", "nan buffer"), ("ddp", "lost"), pytest.param("fsdp2", "nan weight", marks=needs_fsdp2)],
)
def test_sickness_of_one_rank_takes_all_back(kind, trouble, undisturbed, tmp_path):
    """NaN on rank 1 alone: both go back to step 4 and end bit for bit where an undisturbed training ends; also when
    rank 0 has to fetch it from a replica."""
    for answer in answers(guarded, kind, str(tmp_path / "run"), 9, trouble):
        assert answer == {"steps": [1, 2, 3, 4, 5, 6, 5, 6, 7, 8, 9], "digest": undisturbed[kind]}


@pytest.mark.parametrize("when", ["killed", "killed in a save", "killed in a rollback"])
def test_a_rank_that_dies_ends_all(when, tmp_path):
    """kill -9 of rank 1: rank 0 raises and says so; the next start resumes at the known-good step on both."""
    (code, answer, err), (killed, _, _) = run_ranks(guarded, "local", str(tmp_path / "run"), 9, when)
    assert killed == -signal.SIGKILL
    assert code == 0, err
    assert (answer["error"], answer["steps"]) == ("ranks", [1, 2, 3, 4, 5, 6]), answer
    assert not (tmp_path / "run" / "step-000000006").exists()
    for answer in answers(guarded, "local", str(tmp_path / "run"), 9, ""):
        assert answer["steps"] == [5, 6, 7, 8, 9]
