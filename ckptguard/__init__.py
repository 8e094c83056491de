"""ckptguard: verifies every training checkpoint, keeps the last known-good one, takes training back to it.

Public names load on first use, so that ``import ckptguard`` costs training next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ckptguard.version import __version__

if TYPE_CHECKING:
    from ckptguard.decisions.health import Spikes as Spikes
    from ckptguard.decisions.rollback import RollbackPolicy as RollbackPolicy
    from ckptguard.errors import CkptguardError as CkptguardError
    from ckptguard.errors import RollbackExhausted as RollbackExhausted
    from ckptguard.errors import SickTrainingError as SickTrainingError
    from ckptguard.training.guard import TrainingGuard as TrainingGuard
    from ckptguard.training.options import Deadlines as Deadlines
    from ckptguard.training.options import Saving as Saving
    from ckptguard.training.pretrained import check_pretrained as check_pretrained

_WHERE = {
    "CkptguardError": "ckptguard.errors",
    "Deadlines": "ckptguard.training.options",
    "RollbackExhausted": "ckptguard.errors",
    "RollbackPolicy": "ckptguard.decisions.rollback",
    "Saving": "ckptguard.training.options",
    "SickTrainingError": "ckptguard.errors",
    "Spikes": "ckptguard.decisions.health",
    "TrainingGuard": "ckptguard.training.guard",
    "check_pretrained": "ckptguard.training.pretrained",
}

__all__ = ["__version__", *_WHERE]


def __getattr__(name: str) -> object:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    if name == "integrations":
        return importlib.import_module("ckptguard.integrations")
    raise AttributeError(f"module 'ckptguard' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
