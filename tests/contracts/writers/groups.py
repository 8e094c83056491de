"""Which kinds of runs are written together, by one process or one set of ranks, and what loads them again."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from launch import launch


class Group(NamedTuple):
    """Kinds of runs that one process (or one set of ranks) writes."""

    system: str
    kinds: tuple[str, ...]
    ranks: int = 0  # 0: no launcher

    def write(self, root: Path) -> None:
        """Write all of them below a folder."""
        launch(f"write_{self.system}.py", "write", root, *self.kinds, ranks=self.ranks)

    def resume(self, *arguments: object) -> None:
        """Let the framework load checkpoints and compare; AssertionError if one is not what was saved."""
        launch(f"write_{self.system}.py", "resume", *arguments, ranks=self.ranks)


GROUPS = (
    Group("hf_trainer", ("single", "sharded", "lora")),
    Group("hf_trainer", ("ddp",), ranks=2),
    Group("hf_trainer", ("deepspeed",), ranks=2),
    Group("accelerate", ("named", "automatic", "fsdp")),
    Group("accelerate", ("ddp",), ranks=2),
    Group("accelerate", ("deepspeed",), ranks=2),
    Group("deepspeed", ("zero1", "zero2", "zero3"), ranks=2),
    Group("dcp", ("step", "titan", "hf", "hf_shards"), ranks=2),
    Group("lightning", ("files", "finite", "sharded")),
)
BY_KIND = {f"{group.system}/{kind}": group for group in GROUPS for kind in group.kinds}
