"""ckptguard verifies every training checkpoint, keeps the last known-good one, and takes training back to it.

Look at checkpoints, from a script or a notebook:

    verify(target)            read a run, a checkpoint or a file back, and judge it
    known_good(run)           the checkpoint to go back to
    checkpoints(run)          every checkpoint, and what is known of it
    incidents(run)            when training turned sick, and what was done
    incident(run)             the report of one of them, or of the newest
    diff(a, b)                what two checkpoints differ in, tensor by tensor

Use them:

    load(target)              the safe replacement for torch.load: verified while it is loaded
    restore(run, to)          copy the known-good checkpoint out
    rollback(run)             make the known-good checkpoint the newest one
    seal(path)                record what you have just saved, so that every change to it is seen
    check_pretrained(path)    raise an error unless what training starts from is good

Guard a training:

    TrainingGuard(run, model=..., optimizer=...)
    its options: RollbackPolicy, Spikes, Saving, Deadlines
    Guarded                   the type of what it saves and puts back
    ckptguard.integrations    for transformers, accelerate, deepspeed and lightning

Every error is a CkptguardError.

What is public: the names in ``ckptguard.__all__``, the modules ``ckptguard.errors``, ``ckptguard.integrations`` and
``ckptguard.testing``, and the fields of what these functions return. They change only with a line in the changelog,
and stay for one more minor version after they are said to go. Everything else is private, and may change at any time.

All names load when they are first used, so that ``import ckptguard`` costs a training next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ckptguard.version import __version__

if TYPE_CHECKING:
    from ckptguard.api.report import Report as Report
    from ckptguard.api.verbs import checkpoints as checkpoints
    from ckptguard.api.verbs import diff as diff
    from ckptguard.api.verbs import incident as incident
    from ckptguard.api.verbs import incidents as incidents
    from ckptguard.api.verbs import known_good as known_good
    from ckptguard.api.verbs import load as load
    from ckptguard.api.verbs import restore as restore
    from ckptguard.api.verbs import rollback as rollback
    from ckptguard.api.verbs import seal as seal
    from ckptguard.api.verbs import verify as verify
    from ckptguard.decisions.health import Spikes as Spikes
    from ckptguard.decisions.rollback_policy import RollbackPolicy as RollbackPolicy
    from ckptguard.errors import BusyError as BusyError
    from ckptguard.errors import CkptguardError as CkptguardError
    from ckptguard.errors import CouldNotTellError as CouldNotTellError
    from ckptguard.errors import NoKnownGoodError as NoKnownGoodError
    from ckptguard.errors import NotFoundError as NotFoundError
    from ckptguard.errors import RefusedError as RefusedError
    from ckptguard.errors import RollbackExhausted as RollbackExhausted
    from ckptguard.errors import SettingsError as SettingsError
    from ckptguard.errors import SickTrainingError as SickTrainingError
    from ckptguard.errors import StateError as StateError
    from ckptguard.training.guard import TrainingGuard as TrainingGuard
    from ckptguard.training.options import Deadlines as Deadlines
    from ckptguard.training.options import Guarded as Guarded
    from ckptguard.training.options import Saving as Saving
    from ckptguard.training.pretrained import check_pretrained as check_pretrained

_WHERE = {
    "BusyError": "ckptguard.errors",
    "CkptguardError": "ckptguard.errors",
    "CouldNotTellError": "ckptguard.errors",
    "Deadlines": "ckptguard.training.options",
    "Guarded": "ckptguard.training.options",
    "NoKnownGoodError": "ckptguard.errors",
    "NotFoundError": "ckptguard.errors",
    "RefusedError": "ckptguard.errors",
    "Report": "ckptguard.api.report",
    "RollbackExhausted": "ckptguard.errors",
    "RollbackPolicy": "ckptguard.decisions.rollback_policy",
    "Saving": "ckptguard.training.options",
    "SettingsError": "ckptguard.errors",
    "SickTrainingError": "ckptguard.errors",
    "Spikes": "ckptguard.decisions.health",
    "StateError": "ckptguard.errors",
    "TrainingGuard": "ckptguard.training.guard",
    "check_pretrained": "ckptguard.training.pretrained",
    "checkpoints": "ckptguard.api.verbs",
    "diff": "ckptguard.api.verbs",
    "incident": "ckptguard.api.verbs",
    "incidents": "ckptguard.api.verbs",
    "known_good": "ckptguard.api.verbs",
    "load": "ckptguard.api.verbs",
    "restore": "ckptguard.api.verbs",
    "rollback": "ckptguard.api.verbs",
    "seal": "ckptguard.api.verbs",
    "verify": "ckptguard.api.verbs",
}

__all__ = ["__version__", *_WHERE]


def __getattr__(name: str) -> object:
    if name in _WHERE:
        found = globals()[name] = getattr(importlib.import_module(_WHERE[name]), name)
        return found
    if name == "integrations":
        return importlib.import_module("ckptguard.integrations")
    raise AttributeError(f"module 'ckptguard' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
