"""Checks on values: what is an error, what a notice, and what the message says."""

import math

import msgspec
import pytest
from support.evidence import T, manifest
from support.evidence import evidence as made

from ckptguard.checks import facts_of, run_checks
from ckptguard.checks.schema import compare_schemas
from ckptguard.formats.structure import Leaf
from ckptguard.scan.result import Numbers, Scan
from ckptguard.values.verdict import Finding, Outcome, Severity, judge, limit_findings

FINE = Numbers(count=4, largest=1.0)


def evidence(tensors=(("w", "model", (2, 2), FINE),), leaves=(), globals_=(), **more):
    """A one-file checkpoint: tensors as (name, role, shape, numbers)."""
    held = [T(name, role=role, shape=shape, numbers=numbers) for name, role, shape, numbers in tensors]
    given = made({"net.pt": held}, leaves={"net.pt": leaves}, **more)
    [file], replace = given.scan.files, msgspec.structs.replace
    containers = sorted({leaf.name.partition(".")[0] for leaf in leaves if "." in leaf.name})
    structure = replace(file.structure, globals=tuple(globals_), containers=tuple(containers))
    return replace(given, scan=Scan(files=(replace(file, structure=structure),), seconds=0.1))


def heavy(given):
    """(check, tensor or global) of errors."""
    return [(f.check, f.tensor or f.found) for f in run_checks(given) if f.severity is Severity.ERROR]


@pytest.mark.parametrize("role", ["model", "optimizer", "ema"])
@pytest.mark.parametrize("what", ["nan", "posinf", "neginf"])
def test_nonfinite_state_is_an_error(role, what):
    """NaN, +Inf and -Inf in weights, optimizer state and EMA; the count and the first index are told."""
    numbers = Numbers(count=4, first_bad=2, **{what: 1})
    [finding] = [f for f in run_checks(evidence([("w", role, (2, 2), numbers)])) if f.check == "finite"]
    assert (finding.severity, finding.tensor, finding.count) == (Severity.ERROR, "w", 1)
    assert "index 2" in finding.message


def test_masks_and_other_numbers_are_notices():
    """-Inf beside one finite value is a mask; an infinite best score is nobody's weight."""
    mask = Numbers(count=4, neginf=2, first_bad=1, single_finite=True)
    best = Numbers(count=1, posinf=1, first_bad=0)
    assert heavy(evidence([("mask", "model", (2, 2), mask), ("best", "other", (), best)])) == []
    spread = Numbers(count=4, neginf=1, first_bad=1)
    assert heavy(evidence([("w", "model", (2, 2), spread)])) == [("finite", "w")]
    poisoned = Numbers(count=4, neginf=2, nan=1, first_bad=1, single_finite=True)
    assert heavy(evidence([("mask", "model", (2, 2), poisoned)])) == [("finite", "mask")]


def test_a_tensor_may_be_allowed_by_its_very_name():
    """Also where that holds what a pattern would take for a choice: a piece of a distributed checkpoint."""
    sick = Numbers(count=4, first_bad=2, posinf=1)
    for allowed in ("w[0:2, 4:8]", "w*"):
        assert heavy(evidence([("w[0:2, 4:8]", "model", (2, 4), sick)], allow_nonfinite=(allowed,))) == []


def test_a_parameter_of_another_name_is_told_from_a_mask_by_its_moments():
    """Where the optimizer's state is kept by name, as torch's distributed checkpoints keep it."""
    mask = Numbers(count=3, neginf=1, first_bad=1, single_finite=True)
    tensors = [("net.soft_mask", "model", (3,), mask), ("net.mask", "model", (3,), mask)]
    assert heavy(evidence(tensors)) == []
    moment = ("optim.state.net.soft_mask.exp_avg", "optimizer", (3,), FINE)
    assert heavy(evidence([*tensors, moment])) == [("finite", "net.soft_mask")]


def test_a_model_of_zeros_is_bad_and_one_zero_matrix_is_not():
    """All float matrices zero passes every digest; a LoRA's fresh half does not make a model of zeros."""
    zero = Numbers(count=4, zero=True, constant=True)
    assert heavy(evidence([("a", "model", (2, 2), zero), ("b", "model", (2,), FINE)])) == [("finite", "a")]
    assert heavy(evidence([("a", "model", (2, 2), zero), ("b", "model", (2, 2), FINE)])) == []


def test_a_fresh_gaussian_process_is_good():
    """Its constraints have open bounds, and a length scale of one number may be zero; a bound that is not open, or that
    is NaN, is an error as everywhere."""
    scale = ("kernel.raw_lengthscale", "model", (1, 1), Numbers(count=1, zero=True, constant=True))
    upper, lower = "kernel.raw_lengthscale_constraint.upper_bound", "kernel.raw_lengthscale_constraint.lower_bound"
    fine = [scale, (upper, "model", (), Numbers(count=1, posinf=1)), (lower, "model", (2,), Numbers(count=2, neginf=2))]
    assert heavy(evidence(fine)) == []
    for wrong in (Numbers(count=1, nan=1), Numbers(count=1, neginf=1), Numbers(count=2, posinf=1)):
        assert heavy(evidence([scale, (upper, "model", (), wrong)])) == [("finite", upper)]


def test_facts_name_the_constant_matrices():
    """What later checkpoints are compared with."""
    constant = Numbers(count=4, constant=True, largest=1.0)
    tensors = [("a", "model", (2, 2), constant), ("b", "model", (2, 2), FINE), ("c", "model", (2,), constant)]
    assert facts_of(evidence(tensors)).constant == ("a",)


def test_numbers_beside_tensors():
    """NaN in optimizer, scheduler or scaler numbers is an error; an infinite `best` is not; an infinite scale is."""
    leaves = [
        Leaf("optimizer.param_groups.0.lr", math.nan),
        Leaf("scheduler.best", math.inf),
        Leaf("scaler.scale", math.inf),
        Leaf("callbacks.best_score", math.inf),
        Leaf("optimizer.param_groups.0.eps", 1e-8),
    ]
    assert heavy(evidence([("model.w", "model", (2, 2), FINE)], leaves)) == [
        ("finite", "optimizer.param_groups.0.lr"),
        ("finite", "scaler.scale"),
    ]


def test_pickle_safety_in_a_run_and_for_a_stray_file():
    """Executors are errors everywhere; unknown names only in stray files, unless trusted."""
    names = ("collections.OrderedDict", "os.system", "mylib.Config", "torch._utils._rebuild_tensor_v2")
    assert heavy(evidence(globals_=names)) == [("pickle-safety", "os.system")]
    assert heavy(evidence(globals_=names, in_run=False)) == [
        ("pickle-safety", "os.system"),
        ("pickle-safety", "mylib.Config"),
    ]
    assert heavy(evidence(globals_=("mylib.Config",), in_run=False, trust_globals=("mylib.Config",))) == []
    before = manifest({"m.pt": []})
    before = msgspec.structs.replace(before, files=(msgspec.structs.replace(before.files[0], globals=names[:2]),))
    new = [f for f in run_checks(evidence(globals_=names, reference=before)) if f.found == "mylib.Config"]
    assert [f.severity for f in new] == [Severity.WARNING]
    several = ("mylib.Config", "mylib.Head", "mylib.Model")
    for in_run, severity in ((True, Severity.WARNING), (False, Severity.ERROR)):
        told = run_checks(evidence(globals_=several, reference=before, in_run=in_run))
        [line] = [f for f in told if f.check == "pickle-safety"]
        assert (line.severity, line.found, line.count) == (severity, ", ".join(several), 3)


def test_headroom_is_a_notice():
    """Near the fp16 limit."""
    near = evidence([("w", "model", (2, 2), Numbers(count=4, largest=60000.0))])
    [message] = [f.message for f in run_checks(near) if f.check == "headroom"]
    assert "92% of what fp16 can hold" in message
    assert judge(run_checks(near), sealed=True) is Outcome.GOOD


def test_prefix_changes_are_recognised_both_ways():
    """module. put before or gone is one prefix, nothing missing."""
    plain = {"a.w": {("float32", (2,))}, "b": {("float32", ())}}
    wrapped = {f"module.{k}": v for k, v in plain.items()}
    assert compare_schemas(plain, wrapped).prefix == ("module.", "")
    assert compare_schemas(wrapped, plain).prefix == ("", "module.")
    assert not compare_schemas(plain, plain)
    assert compare_schemas(plain, {"a.w": {("float32", (2,))}}, aliases=["b"]).missing == ()


def test_findings_to_outcome():
    """Section 5's table."""

    def one(severity, check="structure"):
        return [Finding(check=check, severity=severity, message="")]

    assert judge(one(Severity.ERROR), sealed=False) is Outcome.BAD
    assert judge(one(Severity.ERROR, "completeness"), sealed=False) is Outcome.INCOMPLETE
    assert judge(one(Severity.ERROR, "completeness"), sealed=True) is Outcome.BAD
    assert judge(one(Severity.ERROR) + one(Severity.ERROR, "completeness"), sealed=False) is Outcome.BAD
    assert judge(one(Severity.SICKNESS), sealed=True) is Outcome.SUSPECT
    assert judge(one(Severity.WARNING) + one(Severity.NOTICE), sealed=True) is Outcome.GOOD


def test_at_most_fifty_findings_of_a_check_are_kept_and_the_rest_counted():
    """Errors stay before notices."""
    many = [Finding(check="finite", severity=Severity.NOTICE, message=str(i)) for i in range(60)]
    many.append(Finding(check="finite", severity=Severity.ERROR, message="heavy"))
    kept = limit_findings(many)
    assert len(kept) == 51
    assert kept[0].message == "heavy"
    assert kept[-1].omitted == 11


def test_numpy_arrays_in_pickles_are_state_too():
    """A NaN in an array is an error unless its place says what it is; a lone numpy scalar is a number."""
    leaves = [
        Leaf("weights.w", math.nan, True),
        Leaf("anything", math.inf, True),
        Leaf("rng.state", math.nan, True),
        Leaf("best", math.inf, False),
    ]
    assert heavy(evidence([("model.w", "model", (2, 2), FINE)], leaves)) == [
        ("finite", "weights.w"),
        ("finite", "anything"),
    ]
