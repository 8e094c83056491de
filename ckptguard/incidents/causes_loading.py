"""Causes that lie in what training began from: damaged files, keys, optimizer state, world size, storage. Pure."""

from __future__ import annotations

import math

from ckptguard.incidents.causes_numeric import cause
from ckptguard.incidents.evidence_queries import Clues
from ckptguard.values.incident import LikelyCause

_SHOWN = 3
_AT_ONCE = 20  # updates
_FEW = 2  # healthy ones before: what was loaded damaged is sick at once
_FLOOR = 1.0


def damaged_file(clues: Clues) -> LikelyCause | None:
    """A pretrained file or a checkpoint that is not what was saved: NaN from the first updates on."""
    because, weight = [], 0.0
    broken = clues.broken()
    if clues.report.cause == "damage" or broken:
        weight = 0.9
        because += broken[:_SHOWN] or [clues.report.reason]
    values = (clues.loss, clues.grad_norm)
    sick = clues.falls >= 2 or any(v is not None and not math.isfinite(v) for v in values)
    since = clues.since_start
    well = max(len(clues.norms), len(clues.losses))
    if sick and since is not None and since <= _AT_ONCE and well <= _FEW:
        weight = max(weight, 0.4)
        began = "the resume" if clues.report.details.resumed is not None else "the start"
        because.append(f"it was sick within {since} updates of {began}: what was loaded may have been so already")
        if clues.scales and clues.scales[-1] <= _FLOOR and clues.falls >= 2:
            weight = max(weight, 0.7)
            because.append(f"the loss scale fell to {clues.scales[-1]:g}: an overflow would have ended on the way")
    if not because:
        return None
    advice = [
        "check the pretrained files: ckptguard verify PATH --check-sums SUMS; download again what differs",
        "in the script, before training: ckptguard.check_pretrained(path, sums=...)",
        "check the run: ckptguard verify RUN",
    ]
    return cause("damaged_file", "A damaged pretrained file or checkpoint", weight, because, advice)


def keys_do_not_match(clues: Clues) -> LikelyCause | None:
    """Weights that were not in the file keep their random start; weights that the model does not know are lost."""
    resumed = clues.report.details.resumed
    because = []
    if resumed is not None:
        for names, what in ((resumed.missing, "missing"), (resumed.unexpected, "unexpected")):
            if names:
                because.append(f"{len(names)} {what} when it was loaded: {_few(names)}")
    bad = clues.report.details.first_bad
    schema = [said for check, said in (bad.errors if bad is not None else ()) if check == "schema"]
    because += schema[:_SHOWN]
    if not because:
        return None
    advice = [
        "load strictly (load_state_dict(strict=True)) and look at what it says",
        "a prefix (module., _orig_mod., model.) on one side only? Strip it before loading",
        "is it the configuration of the same model: size, vocabulary, adapters?",
    ]
    weight = 0.75 if clues.soon else 0.4
    return cause("keys_do_not_match", "Missing or unexpected keys", weight, because, advice)


def optimizer_not_loaded(clues: Clues) -> LikelyCause | None:
    """Moments of zero: the first updates after the resume are as large as the learning rate allows."""
    resumed = clues.report.details.resumed
    if resumed is None or "optimizer" not in resumed.anew:
        return None
    also = [part for part in resumed.anew if part != "optimizer"]
    because = [
        f"the resume at step {resumed.step} started the optimizer anew" + (f" ({_few(also)} too)" if also else "")
    ]
    advice = [
        "resume from a checkpoint that holds the optimizer's state (ckptguard show CKPT says what it holds)",
        "if there is none: warm the learning rate up again",
    ]
    weight = 0.65 if clues.soon else 0.3
    return cause("optimizer_not_loaded", "Optimizer state not loaded", weight, because, advice)


def world_size_differs(clues: Clues) -> LikelyCause | None:
    """Other ranks than at the save: another batch size, other random numbers, sharded state that does not fit."""
    resumed, good = clues.report.details.resumed, clues.report.details.last_good
    saved = resumed.world_size if resumed is not None else good.world_size if good is not None else None
    now = clues.training.world_size
    if saved is None or now is None or saved == now:
        return None
    because = [f"the checkpoint was saved by {saved} ranks, training runs on {now}"]
    advice = [
        f"resume on {saved} ranks",
        "or keep the global batch size (gradient accumulation), and scale the learning rate with it",
        "DeepSpeed's sharded optimizer state loads on as many ranks as saved it only",
    ]
    weight = 0.55 if clues.soon else 0.3
    return cause("world_size_differs", "Another number of ranks than at the save", weight, because, advice)


def storage_failed(clues: Clues) -> LikelyCause:
    """The checkpoint could not be written: nothing is wrong with training."""
    advice = ["is the disk full, or a quota used up? (df -h, df -i)", "is the run's folder writable, and mounted?"]
    return cause("storage_failed", "The storage refused", 0.9, [clues.report.reason], advice)


def _few(names: tuple[str, ...] | list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
