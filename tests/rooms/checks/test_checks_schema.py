"""Schema: what must match the reference, and what may differ from it."""

from __future__ import annotations

import pytest
from support.evidence import Files, T, errors, evidence, found_by, manifest

from ckptguard.values.verdict import Finding

W = T("layer.w")
MOMENT = T("state.0.exp_avg", role="optimizer")


def schema(before: Files, now: Files, **more: object) -> list[Finding]:
    """The findings of the schema check against one reference."""
    return found_by("schema", evidence(now, reference=manifest(before), **more))  # type: ignore[arg-type]


def test_the_same_names_in_the_files_of_several_ranks() -> None:
    """No file hides another's tensor, and none is taken for another's."""
    halves = {"mp_rank_00.pt": [T("w", shape=(4, 2))], "mp_rank_01.pt": [T("w", shape=(3, 2))]}
    assert schema(halves, halves) == []
    assert schema(halves, dict(reversed(halves.items()))) == []
    other = {"mp_rank_00.pt": [T("w", shape=(4, 2))], "mp_rank_01.pt": [T("w", shape=(9, 9))]}
    [finding] = schema(halves, other)
    assert (finding.tensor, finding.expected, finding.found) == ("w", "[3, 2]", "[9, 9]")


def test_two_models_with_the_same_names() -> None:
    """A generator and a discriminator: each is compared with its own."""
    both = {"model.safetensors": [W, T("out")], "model_1.safetensors": [W, T("out", shape=(1,))]}
    assert schema(both, both) == []
    lost = {"model.safetensors": [W, T("out")], "model_1.safetensors": [W]}
    [finding] = schema(both, lost)
    assert (finding.tensor, finding.file) == ("out", None)


def test_shards_cut_anew_are_the_same_model() -> None:
    """From one file to several: only names count."""
    one = {"model.safetensors": [W, T("out")]}
    two = {"model-00001-of-00002.safetensors": [W], "model-00002-of-00002.safetensors": [T("out")]}
    assert schema(one, two) == []
    assert schema(two, one) == []


def test_ranks_may_change_what_is_cut_by_rank() -> None:
    """ZeRO's partitions and flat parameters: their sizes and number, never their kind."""

    def partitions(ranks: int) -> dict[str, list[T]]:
        return {
            f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt": [
                T(f"base.state.{rank}.exp_avg", role="optimizer", shape=(100 // ranks,)),
                T(f"fp32_flat_groups.{rank}", role="optimizer", shape=(100 // ranks,)),
            ]
            for rank in range(ranks)
        }

    four, two = partitions(4), partitions(2)
    assert schema({"m.pt": [W], **four}, {"m.pt": [W], **two}) == []
    bare = {k: [t for t in ts if "exp_avg" not in t.name] for k, ts in two.items()}
    assert len(schema({"m.pt": [W], **four}, {"m.pt": [W], **bare})) == 1
    flat = T("_fsdp_wrapped_module._flat_param")
    assert schema({"m.pt": [flat]}, {"m.pt": [flat._replace(shape=(7,))]}) == []


def test_dcp_is_compared_by_what_its_metadata_lists() -> None:
    """Another number of ranks cuts other chunks of the same tensors."""
    whole = [T("model.w", None, shape=(8, 4))]
    one = {".metadata": whole, "__0_0.distcp": [T("model.w[0:8]", shape=(8, 4))]}
    two = {
        ".metadata": whole,
        "__0_0.distcp": [T("model.w[0:4]", shape=(4, 4))],
        "__1_0.distcp": [T("model.w[4:8]", shape=(4, 4))],
    }
    assert schema(one, two) == []
    other = {**two, ".metadata": [T("model.w", None, shape=(9, 4))]}
    assert [f.tensor for f in schema(one, other)] == ["model.w"]
    pieces_alone = {k: v for k, v in two.items() if k != ".metadata"}
    assert schema(one, pieces_alone) == []  # what is missing is a finding of completeness


def test_optimizer_state_must_keep_its_shapes() -> None:
    """One finding, with the shapes."""
    [finding] = schema({"o.pt": [MOMENT]}, {"o.pt": [MOMENT._replace(shape=(16, 8))]})
    assert (finding.tensor, finding.expected, finding.found) == ("state.0.exp_avg", "[16, 16]", "[16, 8]")


def test_optimizer_state_may_appear_but_not_vanish() -> None:
    """Freezing layers shortens it: one finding with the count."""
    more = T("state.1.exp_avg", role="optimizer")
    assert schema({"m.pt": [W], "o.pt": [MOMENT]}, {"m.pt": [W], "o.pt": [MOMENT, more]}) == []
    [finding] = schema({"m.pt": [W], "o.pt": [MOMENT, more]}, {"m.pt": [W], "o.pt": [MOMENT]})
    assert (finding.tensor, finding.count) == ("state.1.exp_avg", 1)


@pytest.mark.parametrize("role", ["rng", "data", "other", "scheduler", "scaler"])
def test_other_roles_have_no_schema(role: str) -> None:
    """RNG states differ in size from device to device, data positions from epoch to epoch."""
    assert errors(evidence({"x.pt": [T("a", role=role)]}, reference=manifest({"x.pt": [T("b", role=role)]}))) == []


def test_a_prefix_change_is_one_finding() -> None:
    """Also where several ranks hold the same names."""
    before = {f"rank_{r}.pt": [T("a"), T("b")] for r in range(2)}
    now = {f"rank_{r}.pt": [T("module.a"), T("module.b")] for r in range(2)}
    [finding] = schema(before, now)
    assert '"module." was added to the start of every tensor name' in finding.message
