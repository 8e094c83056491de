"""A snapshot in a Hugging Face hub cache: one revision of a repository, as far as it was downloaded."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from ckptguard.formats.table import suffixes_of
from ckptguard.layouts.checkpoint import Checkpoint, Gap, Layout, Structures
from ckptguard.layouts.plain_folder import holds_state
from ckptguard.layouts.sharded import shard_gaps

# Weights in formats without a row in our table: they are only digested.
_FOREIGN_WEIGHTS = re.compile(
    r".*\.(?:gguf|ggml|onnx|onnx_data|h5|keras|msgpack|tflite|pb|ot|mlmodel|mlpackage|nemo|engine"
    r"|pdparams|params|joblib|model|mar|llamafile|task)"
)
HUB_RECORDS = ".cache/huggingface/download"  # `hf download --local-dir` notes there what the hub stated
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHA1 = re.compile(r"[0-9a-f]{40}")


class HubFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a hub cache says about one snapshot, beside its files' bytes. All keys are the storage's.

    - `sums`: file -> (algorithm, hex digest) from its blob's name.
    - `missing`: links without their blob. `refused`: links that were not followed, with the reason.
    - `unfinished`: downloads that did not finish.
    - `lost_refs`: ref -> a commit without a snapshot.
    """

    sums: Mapping[str, tuple[str, str]] = {}
    missing: tuple[str, ...] = ()
    refused: Mapping[str, str] = {}
    unfinished: tuple[str, ...] = ()
    lost_refs: Mapping[str, str] = {}


def stated_by_name(blob: str) -> tuple[str, str] | None:
    """Return the (algorithm, hex digest) in a blob's name: SHA-256 for large files, git's SHA-1 for others.

    None for any other name, which mirrors may use.
    """
    name = blob.rpartition("/")[2]
    if _SHA256.fullmatch(name):
        return "sha256", name
    return ("git-sha1", name) if _SHA1.fullmatch(name) else None


def _gaps(checkpoint: Checkpoint, structures: Structures) -> list[Gap]:
    gaps = shard_gaps(checkpoint, structures)
    holds = any(holds_state(key) or _are_other_weights(key.lower()) for key in checkpoint.files)
    if not checkpoint.files:
        gaps.append(Gap("no file of it was downloaded completely"))
    elif not holds and checkpoint.path.startswith("models--"):
        gaps.append(Gap("there are no weights, only other files of the repository"))
    return gaps


def _are_other_weights(key: str) -> bool:
    """True if a file of this name can replace safetensors."""
    return key.endswith(suffixes_of("arrays", "objects", "pieces")) or _FOREIGN_WEIGHTS.fullmatch(key) is not None


LAYOUT = Layout(name="hub-cache", gaps=_gaps)
