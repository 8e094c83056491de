"""Every kind of damage, on every format and layout: known by the digests where the checkpoint was verified before, and
without them by its own structure, its numbers and the checkpoint before."""

from __future__ import annotations

import os
import random
import shutil

import pytest
from support.damage import KINDS, Hit, applies, set_times
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
def verified(request, tmp_path):
    """A run of one format with two verified checkpoints, and the newer one's manifest."""
    write = WRITERS[request.param]
    write(tmp_path / "run", 100, seed=1)
    path = write(tmp_path / "run", 200, seed=2)
    run = open_run(str(tmp_path / "run"))
    for name in (path.replace("200", "100"), path):
        checked = verify_checkpoint(look(run), look(run).checkpoint(name))
        assert checked.outcome is Outcome.GOOD, checked.findings
    manifest = load_history(run).manifest(CheckpointId(look(run).checkpoint(path).series, 200, 1))
    return tmp_path / "run", run, path, manifest


def harmed(root, manifest, pristine):
    """Do each kind of damage, one after the other: its name, what it hit, and both in words."""
    shutil.copytree(root, pristine, ignore=shutil.ignore_patterns("_ckptguard"))
    for kind in KINDS:
        applied = 0
        for seed in range(SEEDS):
            hit = KINDS[kind](root, manifest, random.Random(seed))
            if hit is None:
                continue
            applied += 1
            yield kind, hit, f"kind={kind} seed={seed} {hit}"
            for file in manifest.files:
                shutil.copy2(pristine / file.path, root / file.path)
        assert applied > 0 or not applies(kind, manifest), kind


def verify_again(run, path):
    """What is said now, and the findings that count."""
    checked = verify_checkpoint(look(run), look(run).checkpoint(path), Verification(record=False))
    return checked, [f for f in checked.findings if f.severity in (Severity.ERROR, Severity.SICKNESS)]


@pytest.mark.campaign
@pytest.mark.parametrize("times", ["kept", "changed", "old", "future"])
def test_damage_is_bad_and_named(verified, times, tmp_path):
    """A verified checkpoint that was harmed is BAD, whatever its times; the harmed file is named, and a tensor of every
    span that was. What torch.save wrote anew with other keys is no damage, but a question."""
    root, run, path, manifest = verified
    for kind, hit, label in harmed(root, manifest, tmp_path / "pristine"):
        set_times(root, manifest, times)
        checked, errors = verify_again(run, path)
        if kind.startswith("key_") and manifest.file(hit.file).format == "torch_zip":
            # Its sums are right: a writer wrote it. Beside the model there may be other keys at any time.
            fine = (Outcome.BAD, Outcome.SUSPECT) if hit.tensors else (Outcome.BAD, Outcome.SUSPECT, Outcome.GOOD)
            assert checked.outcome in fine, f"{label}: {checked.outcome} {checked.findings}"
        else:
            assert checked.outcome is Outcome.BAD, f"{label}: {checked.outcome} {checked.findings}"
            assert hit.file in {f.file for f in errors}, f"{label}: not in {errors}"
        named = {f.tensor for f in errors}
        for group in hit.tensors:
            assert named & set(group), f"{label}: none of {group} in {named}"


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
def test_what_can_be_known_at_first_sight_is_found(verified, tmp_path):
    """Never GOOD, also where nobody ever verified it, and the finding names the file or a tensor of it. Where only the
    checkpoint before contradicts, it is a question: other keys, or fewer."""
    root, run, path, manifest = verified
    for record in (root / "_ckptguard").rglob("000000000200.*"):
        record.unlink()
    for kind, hit, label in harmed(root, manifest, tmp_path / "pristine"):
        if not is_knowable(kind, hit, manifest):
            continue
        checked, errors = verify_again(run, path)
        asks = (Outcome.SUSPECT,) if kind.startswith("key_") or kind == "missing_shard" else ()
        assert checked.outcome in (Outcome.BAD, Outcome.INCOMPLETE, *asks), f"{label}: {checked}"
        tensors = {t for group in hit.tensors for t in group}
        name = os.path.basename(hit.file)
        assert [f for f in errors if f.file == hit.file or f.tensor in tensors or name in f.message], (
            f"{label}: {errors}"
        )
