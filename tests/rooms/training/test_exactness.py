"""Going back and coming back: bit for bit the run that never failed."""

import pytest
import torch
from support.forked import TESTS, Forked
from support.runs import QUICK
from support.tiny_training import Training, assert_same, train

import ckptguard
from ckptguard.records.incidents import list_incidents
from ckptguard.records.run import open_run


@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_replay_equals_a_run_that_never_failed(tmp_path, own_generator, workers):
    """A replay rollback in the middle of an epoch leaves tensors, losses and schedule as if nothing had happened."""
    healthy = Training(own_generator=own_generator, workers=workers)
    train(healthy, tmp_path / "healthy")
    failed = Training(own_generator=own_generator, workers=workers)
    steps = train(failed, tmp_path / "failed", at={10: lambda g: g.rollback("power cut"), 3: lambda g: g.rollback()})
    assert steps == [1, 2, 3, *range(1, 11), *range(9, 18)]
    assert_same(healthy, failed)


def test_a_run_without_a_guard_is_the_same_run(tmp_path):
    """Guarding changes nothing: the same numbers come out as without a guard."""
    plain = Training()
    step = 0
    while step < 17:
        for batch in plain.loader:
            step += 1
            if step > 17:
                break
            plain.update(step, batch)
    guarded = Training()
    train(guarded, tmp_path / "run")
    assert_same(plain, guarded)


def test_a_resume_in_another_object_continues_bit_for_bit(tmp_path):
    """Training that is stopped and started again ends as one that was not."""
    whole = Training()
    train(whole, tmp_path / "whole")
    first = Training()
    train(first, tmp_path / "parts", total=9)
    second = Training(seed=99)
    assert train(second, tmp_path / "parts") == list(range(10, 18))
    second.losses = first.losses | second.losses
    assert_same(whole, second)


def test_a_resume_in_a_fresh_process_continues_bit_for_bit(tmp_path):
    """The same across processes, one of which is killed between two saves."""
    script = (
        "import os, sys, torch\n"
        "from support.tiny_training import Training, train\n"
        "kill = int(sys.argv[2])\n"
        "training = Training(seed=int(sys.argv[1]))\n"
        f"train(training, {str(tmp_path / 'run')!r}, at={{kill: lambda g: os._exit(9)}})\n"
        f"torch.save((training.tensors(), training.losses), {str(tmp_path / 'end.pt')!r})\n"
    )
    for arguments, code in (((7, 11), 9), ((3, 99), 0)):
        with Forked(script, *arguments, path=(TESTS,)) as process:
            assert process.wait() == code
    whole = Training()
    train(whole, tmp_path / "whole")
    tensors, losses = torch.load(tmp_path / "end.pt")
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in whole.tensors().items())
    assert losses == {step: loss for step, loss in whole.losses.items() if step > 8}


def test_the_users_own_files_replay_bit_for_bit(tmp_path):
    """With save= and load= the position in the data and the generators come back too."""
    healthy = Training()
    train(healthy, tmp_path / "healthy")
    mine = Training()
    parts = mine.parts()

    def save(path, step):
        torch.save({name: part.state_dict() for name, part in parts.items()}, path)

    def load(path):
        state = torch.load(path)
        for name, part in parts.items():
            part.load_state_dict(state[name])

    run = tmp_path / "mine"
    steps = train(mine, run, at={10: lambda g: g.rollback()}, save=save, load=load, name="nets/net-{step}.pt")
    assert steps == [*range(1, 11), *range(9, 18)]
    assert_same(healthy, mine)
    assert sorted(p.name for p in run.iterdir()) == ["_ckptguard", "nets"]
    assert sorted(p.name for p in (run / "nets").iterdir()) == [f"net-{n}.pt" for n in (0, 12, 16, 17, 4, 8)]


def test_moments_keep_their_dtype(tmp_path):
    """fp32 moments of a bf16 weight come back as fp32, with every digit."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(2, 8, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    for state in optimizer.state.values():
        state["exp_avg"] = torch.randn(state["exp_avg"].shape, dtype=torch.float32)
    before = [s["exp_avg"].clone() for s in optimizer.state.values()]
    guard = ckptguard.TrainingGuard(tmp_path / "run", model=model, optimizer=optimizer, daemon="off", settings=QUICK)
    guard.save(step=1)
    for state in optimizer.state.values():
        state["exp_avg"].zero_()
    assert guard.resume() == 1
    after = [s["exp_avg"] for s in optimizer.state.values()]
    assert all(a.dtype == torch.float32 and torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_a_request_is_on_record(tmp_path):
    """A rollback leaves an incident with what was done, and a report that people can read."""
    training = Training()
    train(training, tmp_path / "run", at={6: lambda g: g.rollback("the disk was swapped")})
    (incident,) = list_incidents(open_run(str(tmp_path / "run")))
    assert (incident.step, incident.cause, incident.state, incident.known_good) == (6, "asked", "closed", "4.1")
    report = (tmp_path / "run" / "_ckptguard" / "incidents" / f"{incident.id}.txt").read_text()
    assert "the disk was swapped" in report
    assert "went back from step 6 to step 4" in report
