"""Every kind of damage, on every format and layout, with times kept, changed, old and in the future: BAD, and the
right file and tensor named. What torch.save wrote anew with other keys is no damage, but a question."""

from __future__ import annotations

import os
import random
import shutil

import pytest
from support.damage import KINDS, applies, set_times
from support.layouts import WRITERS
from support.views import look

from ckptguard.records.run import open_run
from ckptguard.runs.history import load_history
from ckptguard.values.verdict import Outcome, Severity
from ckptguard.verification.checkpoint import Verification, verify_checkpoint

SEEDS = 20 if os.environ.get("CKPTGUARD_CAMPAIGN") == "full" else 1


@pytest.fixture(params=sorted(WRITERS))
def verified(request, tmp_path):
    """A run of one format with two verified checkpoints, and the newer one's manifest."""
    write = WRITERS[request.param]
    write(tmp_path / "run", 100, seed=1)
    path = write(tmp_path / "run", 200, seed=2)
    run = open_run(str(tmp_path / "run"))
    for name in (path.replace("200", "100"), path):
        checked = verify_checkpoint(look(run), look(run).checkpoint(name))
        assert checked.outcome is Outcome.GOOD, checked.findings
    checkpoint = look(run).checkpoint(path)
    history = load_history(run)
    manifest = history.manifest(history.current(checkpoint.series, 200, path))
    return tmp_path / "run", run, path, manifest


@pytest.mark.campaign
@pytest.mark.parametrize("times", ["kept", "changed", "old", "future"])
def test_damage_is_bad_and_named(verified, times, tmp_path):
    """A verified checkpoint that was harmed is BAD; the harmed file is named, and a tensor of every span that was."""
    root, run, path, manifest = verified
    pristine = tmp_path / "pristine"
    shutil.copytree(root, pristine, ignore=shutil.ignore_patterns("_ckptguard"))
    for kind in KINDS:
        applied = 0
        for seed in range(SEEDS):
            label = f"kind={kind} times={times} seed={seed}"
            hit = KINDS[kind](root, manifest, random.Random(seed))
            if hit is None:
                continue
            applied += 1
            set_times(root, manifest, times)
            checked = verify_checkpoint(look(run), look(run).checkpoint(path), Verification(record=False))
            errors = [f for f in checked.findings if f.severity in (Severity.ERROR, Severity.SICKNESS)]
            if kind.startswith("key_") and manifest.file(hit.file).format == "torch_zip":
                # Its sums are right: a writer wrote it. Beside the model there may be other keys at any time.
                fine = (Outcome.BAD, Outcome.SUSPECT) if hit.tensors else (Outcome.BAD, Outcome.SUSPECT, Outcome.GOOD)
                assert checked.outcome in fine, f"{label}: {checked.outcome} {checked.findings}"
            else:
                assert checked.outcome is Outcome.BAD, f"{label}: {checked.outcome} {checked.findings}"
                assert hit.file in {f.file for f in errors}, f"{label}: {hit} not in {errors}"
            named = {f.tensor for f in errors}
            for group in hit.tensors:
                assert named & set(group), f"{label}: none of {group} in {named}"
            for file in manifest.files:
                shutil.copy2(pristine / file.path, root / file.path)
        assert applied > 0 or not applies(kind, manifest), kind
