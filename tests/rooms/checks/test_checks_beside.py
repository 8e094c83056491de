"""What lies beside the weights: files that belong together, what a resume brings back, numbers that are no weights."""

from __future__ import annotations

import math

import msgspec
import pytest
from support.evidence import T, errors, evidence, found_by, manifest

from ckptguard.checks import facts_of, run_checks
from ckptguard.formats.structure import Leaf, TensorPlace
from ckptguard.layouts.roles import assign_roles
from ckptguard.scan.result import Numbers, Scan
from ckptguard.values.record_text import decode_checked, encode_checked
from ckptguard.values.verdict import Facts, Severity

W = T("w")
MOMENT = T("m", role="optimizer")


def test_files_that_only_a_manifest_binds() -> None:
    """One notice at first sight; none once sealed, and none for one file."""
    two = {"model.safetensors": [W], "optimizer.pt": [MOMENT]}
    [notice] = found_by("completeness", evidence(two))
    assert notice.severity is Severity.NOTICE
    assert "2 files" in notice.message
    assert "different saves" in notice.message
    assert found_by("completeness", evidence(two, sealed=manifest(two, step=2))) == []
    assert found_by("completeness", evidence({"model.safetensors": [W], "rng.pt": [T("r", role="rng")]})) == []


def test_no_metadata_file_binds_its_pieces() -> None:
    """DCP says where each piece lies, and no piece says of which save it is: one of another fits as well."""
    dcp = {".metadata": [T("w", None)], "__0_0.distcp": [T("w[0:8]")], "__1_0.distcp": [T("w[8:16]")]}
    [notice] = found_by("completeness", evidence(dcp))
    assert (notice.severity, "different saves" in notice.message) == (Severity.NOTICE, True)
    assert found_by("completeness", evidence(dcp, sealed=manifest(dcp, step=2))) == []


def test_fewer_rng_files_than_the_reference() -> None:
    """A warning: those ranks would resume with other random numbers."""
    ranks = {f"rng_state_{r}.pth": [T("r", role="rng")] for r in range(4)}
    fewer = {k: v for k, v in ranks.items() if "3" not in k}
    found = found_by("completeness", evidence({"m.pt": [W], **fewer}, reference=manifest({"m.pt": [W], **ranks})))
    assert [f.severity for f in found] == [Severity.WARNING]
    assert "has 4 files rng_state_#.pth; this checkpoint has 3" in found[0].message
    assert found_by("completeness", evidence({"m.pt": [W], **ranks}, reference=manifest({"m.pt": [W], **fewer}))) == []


def test_what_a_resume_would_start_anew() -> None:
    """Weights alone, of a training: a notice. What the reference held in the same file: a warning."""
    full = {"m.pt": [W, MOMENT]}
    before = Facts(resumable=("model", "optimizer", "scheduler", "rng"))
    alone = evidence({"m.pt": [W]})
    assert found_by("resumable", alone) == []  # a model that somebody downloaded, or dumps for evaluation
    assert found_by("resumable", evidence({"m.pt": [W]}, reference_facts=Facts(resumable=("model",)))) == []
    for of_a_training in (
        evidence({"m.pt": [W], "trainer_state.json": []}),
        evidence({"m.pt": [W], "rng_state.pth": []}),
        evidence({"m.pt": [W]}, reference_facts=before),
        evidence({"m.pt": [W]}, previous_facts=before),
    ):
        assert [f.severity for f in found_by("resumable", of_a_training)] == [Severity.NOTICE]
    given = evidence(full, reference=manifest(full), reference_facts=before)
    [finding] = found_by("resumable", given)
    assert (finding.severity, "scheduler, rng" in finding.message) == (Severity.WARNING, True)
    filed = manifest({**full, "scheduler.pt": [], "rng_state.pth": []})
    assert found_by("resumable", evidence(full, reference=filed, reference_facts=before)) == []


def test_the_world_size_that_a_resume_needs() -> None:
    """DeepSpeed's partitions load on as many ranks as saved them."""
    leaves = {"mp_rank_00_model_states.pt": [Leaf("dp_world_size", 4), Leaf("mp_world_size", 2)]}
    files = {"zero_pp_rank_0_mp_rank_00_optim_states.pt": [MOMENT], "mp_rank_00_model_states.pt": [W]}
    [finding] = found_by("resumable", evidence(files, leaves=leaves))
    assert (finding.severity, "needs 8 ranks" in finding.message) == (Severity.NOTICE, True)
    assert facts_of(evidence(files, leaves=leaves)).world_size == 8
    for nonsense in (0, -1, 10**9, 2.0):
        wrong = {"mp_rank_00_model_states.pt": [Leaf("dp_world_size", nonsense)]}
        assert facts_of(evidence(files, leaves=wrong)).world_size is None


def test_facts_of_older_versions_are_read() -> None:
    """New fields have defaults, and take no room where they say nothing."""
    text = encode_checked(Facts(largest_magnitude=1.0))
    assert b"stale" not in text
    assert decode_checked(text, Facts, "facts") == Facts(largest_magnitude=1.0)


@pytest.mark.parametrize(
    ("file", "name", "value", "weighs"),
    [
        ("scheduler.pt", "_last_lr.0", math.inf, True),
        ("scheduler.pt", "best", math.inf, False),
        ("scheduler.pt", "best", math.nan, True),
        ("optimizer.pt", "param_groups.0.betas.1", math.inf, True),
        ("optimizer.pt", "param_groups.0.max_grad_norm", math.inf, False),
        ("x_optim_states.pt", "optimizer_state_dict.loss_scaler.cur_scale", math.inf, True),
        ("trainer_state.json", "log_history.-1.grad_norm", math.nan, False),
    ],
)
def test_numbers_in_subtrees(file: str, name: str, value: float, weighs: bool) -> None:
    """NaN always weighs there; infinity where it is a rate or a scale."""
    found = errors(evidence({"m.pt": [W]}, leaves={file: [Leaf(name, value)]}))
    assert found == ([("finite", name)] if weighs else [])


def test_which_0_dim_tensors_are_no_weights() -> None:
    """Those in no container with other tensors; of a flat state dict each one is a weight."""

    def roles(containers: tuple[str, ...], **shapes: tuple[int, ...]) -> list[str]:
        places = [TensorPlace(name.replace("__", "."), "float32", shape, 0) for name, shape in shapes.items()]
        return assign_roles("net.pt", places, containers=containers)

    assert roles((), w=(4, 4), logit_scale=()) == ["model", "model"]
    assert roles(("model",), model__w=(4, 4), model__logit_scale=(), best=()) == ["model", "model", "other"]
    assert roles(("gen",), gen__w=(4, 4), gen__scale=(), best=()) == ["model", "model", "other"]
    assert roles(("gen", "seen"), gen__w=(4, 4), seen__best=()) == ["model", "other"]
    assert roles(("gen",), gen__w=(4, 4), w=(4,), scale=()) == ["model", "model", "model"]
    assert roles(("a",), a__t=(), b=()) == ["model", "model"]


@pytest.mark.parametrize("role", ["model", "ema"])
def test_masks_of_an_ema_are_masks(role: str) -> None:
    """An averaged model has the same buffers."""
    given = evidence({"m.pt": [T("mask", role=role)]})
    mask = Numbers(count=4, neginf=2, first_bad=1, single_finite=True)
    masked = msgspec.structs.replace(given.scan.files[0], numbers=(mask,))
    found = run_checks(msgspec.structs.replace(given, scan=Scan(files=(masked,), seconds=0.1)))
    assert [f.severity for f in found if f.check == "finite"] == [Severity.NOTICE]
