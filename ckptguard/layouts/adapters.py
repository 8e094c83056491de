"""PEFT's adapters: weights, and ``adapter_config.json``, written after them; nothing loads without it."""

from __future__ import annotations

from ckptguard.layouts.checkpoint import Checkpoint, Gap

_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


def adapter_gaps(checkpoint: Checkpoint) -> list[Gap]:
    """Adapters in the checkpoint, or in folders inside it, that have no configuration beside them."""
    keys = set(checkpoint.files)
    folders = {key.rpartition("/")[0] for key in keys if key.rpartition("/")[2] in _WEIGHTS}
    wanted = sorted(f"{folder}/adapter_config.json".lstrip("/") for folder in folders)
    return [Gap(message="not there; PEFT writes it last", file=key) for key in wanted if key not in keys]
