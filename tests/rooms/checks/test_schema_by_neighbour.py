"""What changes in some tensors while their siblings keep it is a question; what changes in all is another choice."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from support.evidence import T, evidence, found_by, manifest
from support.runs import QUICK

from ckptguard.values.verdict import Outcome, Severity
from ckptguard.verification.target import Selection, verify_target

ADAM = ("exp_avg", "exp_avg_sq")
OPTIMIZERS = {
    "adam": ADAM,
    "amsgrad": (*ADAM, "max_exp_avg_sq"),
    "sgd": ("momentum_buffer",),
    "8 bits": ("state1", "state2"),
}
DTYPES = ("int32", "float16", "bfloat16", "int8", "uint8", "float64", "int64")
CASES = 600


def saved(kinds: tuple[str, ...], count: int, *, partitioned: bool, quantised: bool) -> list[T]:
    """The optimizer tensors of so many parameters. With `quantised` every second state has 8 bits."""
    folder = "base_state" if partitioned else "state"
    return [
        T(
            f"{folder}.{n}.{kind}",
            role="optimizer",
            shape=(8 + n, 4),
            dtype="uint8" if quantised and n % 2 else "float32",
        )
        for n in range(count)
        for kind in kinds
    ]


def asked(before: list[T], now: list[T], file: str) -> list[str]:
    """What the schema check asks about, against the save before."""
    found = found_by(
        "schema",
        evidence(
            {"model.safetensors": [T("w")], file: now},
            reference=manifest({"model.safetensors": [T("w")], file: before}),
        ),
    )
    assert all(f.severity is Severity.SICKNESS for f in found)
    return [f.message for f in found]


def test_a_dtype_that_changes_in_some_is_asked_about():
    """In the optimizer, of one tensor up to all but one of a kind; not if all of the kind change."""
    against = []
    for number in range(CASES):
        rng = random.Random(number)
        name = rng.choice(list(OPTIMIZERS))
        partitioned = rng.random() < 0.3
        file = "zero_pp_rank_0_mp_rank_00_optim_states.pt" if partitioned else "optimizer.pt"
        count = rng.randint(2, 9)
        before = saved(OPTIMIZERS[name], count, partitioned=partitioned, quantised=name == "8 bits")
        kind, dtype = rng.choice(OPTIMIZERS[name]), rng.choice(DTYPES)
        of_kind = [n for n, t in enumerate(before) if t.name.endswith(f".{kind}") and t.dtype == "float32"]
        rest = [t for t in before if t.name.endswith(f".{kind}") and t.dtype != "float32"]
        chosen = set(rng.sample(of_kind, rng.randint(0, len(of_kind))))
        now = [t._replace(dtype=dtype) if n in chosen else t for n, t in enumerate(before)]
        changed, kept = len(chosen), len(of_kind) - len(chosen) + len(rest)
        # Most of them to another float: a resume rounds what it holds for weights of that type.
        rounded = dtype in ("float16", "bfloat16", "float64") and changed > kept
        new = not partitioned or dtype not in {t.dtype for t in rest}  # ranks may cut what they hold otherwise
        expected = bool(changed and kept and new and not rounded)
        if bool(asked(before, now, file)) is not expected:
            against.append((number, name, kind, dtype, changed, kept, partitioned))
    assert not against, (len(against), against[:9])


def test_what_changes_in_all_or_is_new_is_not_asked_about():
    """Moments in another precision, state of parameters that were frozen, fewer ranks."""
    adam = saved(ADAM, 6, partitioned=False, quantised=False)
    assert asked(adam, [t._replace(dtype="bfloat16") for t in adam], "optimizer.pt") == []
    assert asked(adam[:6], adam, "optimizer.pt") == []
    assert asked(adam[6:], adam, "optimizer.pt") == []
    mixed = saved(("state1", "state2"), 6, partitioned=False, quantised=True)
    assert asked(mixed, mixed, "optimizer.pt") == []


@pytest.mark.parametrize("role", ["model", "optimizer"])
@pytest.mark.parametrize("what", ["dtype", "shape", "name"])
def test_one_of_a_real_archive_is_asked_about(role, what, tmp_path: Path):
    """Written anew by somebody, with right checksums, as the next save of the run."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in (1, 2, 3):
        model(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        path = tmp_path / f"ckpt-{step}.pt"
        torch.save(state, path)
        if step == 3:
            state = torch.load(path, weights_only=False)
            holder = state["model"] if role == "model" else state["optimizer"]["state"][2]
            name = "1.weight" if role == "model" else "exp_avg"
            tensor = holder.pop(name)
            new = {"dtype": tensor.view(torch.int32), "shape": tensor.reshape(-1), "name": tensor}[what]
            holder[name + "_x" * (what == "name")] = new
            torch.save(state, path)
    found = {c.path: c for c in verify_target(str(tmp_path), QUICK, Selection(wait=0)).checkpoints}
    assert [found[f"ckpt-{step}.pt"].outcome for step in (1, 2)] == [Outcome.GOOD] * 2
    assert found["ckpt-3.pt"].outcome is Outcome.SUSPECT
