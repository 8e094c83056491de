"""Hugging Face Trainer's ``checkpoint-N`` folder. Rank 0 writes ``trainer_state.json`` last.

The weights may be one file, shards, an adapter (PEFT), DeepSpeed's ``global_stepN/`` or FSDP's sharded folders.
"""

from __future__ import annotations

import re

from ckptguard.layouts.checkpoint import Checkpoint, Folder, Gap, Layout, Structures
from ckptguard.layouts.engine_states import engine_gaps, has_engine_states, optimizer_there, rank_gaps
from ckptguard.layouts.plain_folder import holds_weights
from ckptguard.layouts.roles import file_role
from ckptguard.layouts.sharded import adapter_gaps, shard_gaps

_FOLDER = re.compile(r"checkpoint-(\d{1,12})")
_MARKS = frozenset(("trainer_state.json", "training_args.bin"))


def _accepts(folder: Folder) -> bool:
    return _FOLDER.fullmatch(folder.name) is not None and not _MARKS.isdisjoint(folder.files)


def _gaps(checkpoint: Checkpoint, structures: Structures) -> list[Gap]:
    names = {checkpoint.inside(key) for key in checkpoint.files}
    gaps = [*shard_gaps(checkpoint, structures), *adapter_gaps(checkpoint)]
    gaps += engine_gaps(checkpoint, structures, latest_needed=True)
    if not any(holds_weights(name) for name in names) and not has_engine_states(checkpoint):
        gaps.append(Gap("there are no weights"))
    if "scheduler.pt" in names and not optimizer_there(checkpoint):
        message = "missing, although the scheduler's state is there: a resume would silently restart the optimizer"
        gaps.append(Gap(message, checkpoint.key("optimizer.pt")))
    elif "optimizer.pt" in names and "scheduler.pt" not in names:
        message = "missing: without it a resume silently ignores the optimizer's state, too"
        gaps.append(Gap(message, checkpoint.key("scheduler.pt")))
    if "optimizer.pt" in names and not any(file_role(name) == "rng" for name in names):
        gaps.append(Gap("there is no rng_state: a resume would continue with other random numbers", fatal=False))
    state = checkpoint.key("trainer_state.json")
    if "trainer_state.json" not in names:
        gaps.append(Gap("missing; the Trainer writes it last", state))
    elif state in structures:
        stated = next((leaf.value for leaf in structures[state].leaves if leaf.name == "global_step"), None)
        if stated is not None and checkpoint.step is not None and stated != checkpoint.step:
            message = f"it states global_step {stated} in a folder for {checkpoint.step}"
            gaps.append(Gap(message, state, fatal=False))
    return [*gaps, *rank_gaps(checkpoint, structures)]


LAYOUT = Layout(
    name="hf-trainer",
    gaps=_gaps,
    accepts=_accepts,
    pieces=lambda inner: inner.startswith("global_step"),
    last_written=lambda path: f"{path}/trainer_state.json",
    last_is_the_end=True,
)
