"""Hugging Face Trainer's ``checkpoint-N`` folder; ``trainer_state.json`` is what rank 0 writes last."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ckptguard.formats.structure import Structure
from ckptguard.layouts.checkpoint import Checkpoint, Gap, Layout
from ckptguard.layouts.sharded import shard_gaps

FOLDER = re.compile(r"checkpoint-(\d{1,12})")
MARKS = ("trainer_state.json", "training_args.bin")
_WEIGHTS = re.compile(r"(?:(?:pytorch_)?model|adapter_model)(?:-\d+-of-\d+)?\.(?:safetensors|bin)")


def _gaps(checkpoint: Checkpoint, structures: Mapping[str, Structure]) -> list[Gap]:
    names = {checkpoint.inside(key) for key in checkpoint.files}
    gaps = shard_gaps(checkpoint, structures)
    if not any(_WEIGHTS.fullmatch(name) for name in names) and not any(n.startswith("global_step") for n in names):
        gaps.append(Gap(message="there are no weights (model or adapter_model)"))
    state = f"{checkpoint.path}/trainer_state.json"
    if "trainer_state.json" not in names:
        gaps.append(Gap(message="not there; the Trainer writes it last", file=state))
    elif state in structures:
        stated = next((leaf.value for leaf in structures[state].leaves if leaf.name == "global_step"), None)
        if stated is not None and checkpoint.step is not None and stated != checkpoint.step:
            gaps.append(
                Gap(
                    message=f"it states global_step {stated} in a folder for {checkpoint.step}", file=state, fatal=False
                )
            )
    return gaps


LAYOUT = Layout(name="hf-trainer", gaps=_gaps, last_written="trainer_state.json")
