"""Metrics that are given with a save are in the manifest, whoever seals it."""

import json
import math

import pytest
import torch
from support.guards import guarded
from support.rank_processes import run_ranks
from support.runs import state_dict
from support.views import look

import ckptguard
from ckptguard.errors import SettingsError
from ckptguard.records.manifests import checked_metrics, read_manifest
from ckptguard.records.run import open_run
from ckptguard.retention.prune import prune
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.ids import CheckpointId
from ckptguard.values.manifest import decode_manifest
from ckptguard.values.record_text import encode_checked
from ckptguard.values.retention_policy import Best, Policy


def guard_of(tmp_path, **options):
    """A guard over a tiny model."""
    return guarded(tmp_path / "run", torch.nn.Linear(2, 2), **options)


@pytest.mark.parametrize("blocking", [True, False])
def test_our_own_layout_seals_them(tmp_path, blocking):
    """Finite ones are numbers, others words; text of the manifest and back is the same."""
    given = {"eval_loss": torch.tensor(2.5), "accuracy": 1, "odd": math.nan, "high": math.inf}
    with guard_of(tmp_path) as guard:
        guard.save(3, metrics=given, blocking=blocking)
        guard.wait_for_save()
    [series] = {s.series for s in reconciled(tmp_path)}
    manifest = read_manifest(open_run(str(tmp_path / "run")), CheckpointId(series, 3, 1))
    assert manifest.metrics == {"eval_loss": 2.5, "accuracy": 1.0}
    assert manifest.nonfinite_metrics == {"odd": "nan", "high": "inf"}
    assert decode_manifest(encode_checked(manifest)) == manifest
    assert math.isnan(manifest.given_metrics()["odd"])


def reconciled(tmp_path):
    """Everything verified."""
    return reconcile(look(open_run(str(tmp_path / "run"))), PassNotes()).checked


def test_files_of_the_users_own_are_sealed_with_them(tmp_path):
    """The observer that seals takes over what was given; a save that failed leaves nothing to the next."""
    fail = [True]

    def save(path, step):
        if fail[0]:
            raise OSError("no")
        torch.save(state_dict(step), path)

    with guard_of(tmp_path, save=save, load=torch.load, name="net-{step}.pt") as guard:
        with pytest.raises(OSError, match="no"):
            guard.save(1, metrics={"loss": 9.0})
        fail[0] = False
        guard.save(1, metrics={"loss": 2.0, "odd": -math.inf})
        guard.save(2, metrics={"loss": 1.0})
        guard.save(3)
    reconciled(tmp_path)
    run = open_run(str(tmp_path / "run"))
    found = [read_manifest(run, CheckpointId("net-#.pt", step, 1)).given_metrics() for step in (1, 2, 3)]
    assert found == [{"loss": 2.0, "odd": -math.inf}, {"loss": 1.0}, {}]


def test_a_trainers_log_is_taken_where_nothing_was_given(tmp_path):
    """Hugging Face's Trainer writes its evaluation into the checkpoint; the best by it stays."""
    root = tmp_path / "run"
    for step, loss in ((100, 3.0), (200, 1.0), (300, 2.0), (400, math.nan)):
        folder = root / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        torch.save(state_dict(step), folder / "pytorch_model.bin")
        log = [{"loss": 0.5, "step": step}, {"eval_loss": loss, "step": step}]
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": log}))
    reconciled(tmp_path)
    done = prune(look(str(root)), Policy(keep_best=(Best("eval_loss", "min"),), keep_good=1), grace=60.0)
    assert [d.checkpoint.id.step for d in done.removed] == [100, 300]


def save_on_ranks(folder):
    """Save on every rank, each with a number of its own."""
    rank = torch.distributed.get_rank()
    with ckptguard.TrainingGuard(folder, model=torch.nn.Linear(2, 2), daemon="off") as guard:
        guard.save(1, metrics={"loss": 1.5 + rank, "odd": math.nan})
        guard.save(2, metrics={"loss": 2.5 + rank}, blocking=False)
        guard.wait_for_save()
        return [guard.run]


@pytest.mark.torch
def test_of_several_ranks_those_of_the_first_count(tmp_path):
    """Rank 0 seals, with what was given to it."""
    for code, _, err in run_ranks(save_on_ranks, str(tmp_path / "run")):
        assert code == 0, err
    run = open_run(str(tmp_path / "run"))
    first, second = (read_manifest(run, CheckpointId("step-#", step, 1)) for step in (1, 2))
    assert (first.metrics, first.nonfinite_metrics) == ({"loss": 1.5}, {"odd": "nan"})
    assert (second.metrics, second.nonfinite_metrics) == ({"loss": 2.5}, {})


@pytest.mark.parametrize("given", [{"a": "1"}, {"a": None}, {"": 1.0}, {1: 1.0}, {"a": torch.zeros(0)}, {"a": 10**400}])
def test_what_is_no_number_is_left_out(tmp_path, given):
    """A checkpoint is worth more than its metrics: it is saved with the others. Sealing by hand refuses them."""
    with pytest.raises(SettingsError, match="metric"):
        checked_metrics(given)
    with guard_of(tmp_path) as guard:
        guard.save(1, metrics={"fine": 2.0, **given})
    assert read_manifest(open_run(str(tmp_path / "run")), CheckpointId("step-#", 1, 1)).metrics == {"fine": 2.0}
