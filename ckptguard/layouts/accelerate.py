"""Accelerate's ``save_state`` folder, named by the user or automatically (``checkpoint_K``, where K counts saves).

No file marks its end: another rank's random states or custom objects may come last. User hooks may save the weights
under other names (``unet/``, ``pytorch_lora_weights.safetensors``).
"""

from __future__ import annotations

import re

from ckptguard.layouts.checkpoint import Checkpoint, Folder, Gap, Layout, Structures
from ckptguard.layouts.engine_states import engine_gaps, has_engine_states, optimizer_there, rank_gaps
from ckptguard.layouts.plain_folder import holds_weights
from ckptguard.layouts.sharded import shard_gaps

_RANDOM = re.compile(r"random_states_\d+\.pkl")
_INSIDE = re.compile(r"pytorch_model(?:_\d+)?/\w*(?:mp_rank|zero_pp_rank)\w*\.pt|pytorch_model_fsdp_\d+/.+")
_CUSTOM = re.compile(r"custom_checkpoint_(\d{1,6})\.pkl")


def _accepts(folder: Folder) -> bool:
    return (
        any(_RANDOM.fullmatch(f) for f in folder.files)
        or any(_INSIDE.fullmatch(f) for f in folder.below)
        or ("optimizer.bin" in folder.files and any(holds_weights(f) for f in (*folder.files, *folder.below)))
    )


def _gaps(checkpoint: Checkpoint, structures: Structures) -> list[Gap]:
    names = {checkpoint.inside(key) for key in checkpoint.files}
    gaps = [*shard_gaps(checkpoint, structures), *engine_gaps(checkpoint, structures)]
    if not any(holds_weights(name) for name in names) and not has_engine_states(checkpoint):
        gaps.append(Gap("there are no weights"))
    if not any(_RANDOM.fullmatch(name) for name in names):
        gaps.append(Gap("there are no random_states; Accelerate writes them last"))
    if "scheduler.bin" in names and not optimizer_there(checkpoint):
        gaps.append(Gap("missing, although the scheduler's state is there", checkpoint.key("optimizer.bin")))
    custom = sorted(int(match[1]) for name in names if (match := _CUSTOM.fullmatch(name)))
    if custom and custom[-1] + 1 != len(custom):
        gaps.append(Gap(f"only {len(custom)} of {custom[-1] + 1} custom_checkpoint files are there"))
    return [*gaps, *rank_gaps(checkpoint, structures)]


LAYOUT = Layout(name="accelerate", gaps=_gaps, accepts=_accepts)
