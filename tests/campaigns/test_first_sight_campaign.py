"""What can be known without a digest, on every format and layout: a checkpoint that nobody sealed, with good ones
before it, harmed in ways that its own structure, its numbers or the reference contradict."""

from __future__ import annotations

import os
import random
import shutil

import pytest
from support.damage import KINDS, Hit, applies
from support.layouts import WRITERS
from support.views import look

from ckptguard.records.run import open_run
from ckptguard.runs.history import load_history
from ckptguard.values.ids import CheckpointId
from ckptguard.values.manifest import Manifest
from ckptguard.values.verdict import Outcome, Severity
from ckptguard.verification.checkpoint import Verification, verify_checkpoint

SEEDS = 20 if os.environ.get("CKPTGUARD_CAMPAIGN") == "full" else 1
STATE = ("model", "optimizer", "ema")
CHECKED = ("torch_zip", "distcp", "npz")  # containers with a CRC for every tensor


@pytest.fixture(params=sorted(WRITERS))
def unsealed(request, tmp_path):
    """A run whose step 100 is verified and whose step 200 was never seen; the manifest that 200 would get."""
    write = WRITERS[request.param]
    root = tmp_path / "run"
    write(root, 100, seed=1)
    path = write(root, 200, seed=2)
    run = open_run(str(root))
    for name in (path.replace("200", "100"), path):
        assert verify_checkpoint(look(run), look(run).checkpoint(name)).outcome is Outcome.GOOD
    checkpoint = look(run).checkpoint(path)
    manifest = load_history(run).manifest(CheckpointId(checkpoint.series, 200, 1))
    for record in (root / "_ckptguard").rglob("000000000200.*"):
        record.unlink()
    return root, run, path, manifest


def is_knowable(kind: str, hit: Hit, manifest: Manifest) -> bool:
    """Whether the file itself, or the checkpoint before, contradicts this harm."""
    file = manifest.file(hit.file)
    roles = {t.name: t.role for t in file.tensors}
    if kind.startswith("non_finite") or kind == "optimizer_only":
        return any(roles[name] in STATE for group in hit.tensors for name in group)
    if kind == "span_flip":
        return file.format in CHECKED
    if kind.startswith("key_"):
        return bool(hit.tensors)  # the schema is that of the model
    if kind == "missing_shard":
        return any(role in STATE for role in roles.values())  # random states of a rank are a warning
    return kind in ("truncation", "empty_shard", "appended_bytes")


@pytest.mark.campaign
def test_what_can_be_known_is_found(unsealed, tmp_path):
    """Never GOOD, and the finding names the file or a tensor of it. Where only the checkpoint before contradicts, it is
    a question: other keys, or fewer."""
    root, run, path, manifest = unsealed
    pristine = tmp_path / "pristine"
    shutil.copytree(root, pristine, ignore=shutil.ignore_patterns("_ckptguard"))
    for kind in KINDS:
        applied = 0
        for seed in range(SEEDS):
            hit = KINDS[kind](root, manifest, random.Random(seed))
            if hit is None:
                continue
            applied += 1
            if is_knowable(kind, hit, manifest):
                checked = verify_checkpoint(look(run), look(run).checkpoint(path), Verification(record=False))
                label = f"kind={kind} seed={seed} {hit}"
                asks = (Outcome.SUSPECT,) if kind.startswith("key_") or kind == "missing_shard" else ()
                assert checked.outcome in (Outcome.BAD, Outcome.INCOMPLETE, *asks), f"{label}: {checked}"
                errors = [f for f in checked.findings if f.severity in (Severity.ERROR, Severity.SICKNESS)]
                tensors = {t for group in hit.tensors for t in group}
                name = os.path.basename(hit.file)
                named = [f for f in errors if f.file == hit.file or f.tensor in tensors or name in f.message]
                assert named, f"{label}: {errors}"
            for file in manifest.files:
                shutil.copy2(pristine / file.path, root / file.path)
        assert applied > 0 or not applies(kind, manifest), kind
