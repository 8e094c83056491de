"""What a file or a tensor is for: model, optimizer, ema, scheduler, scaler, rng, data, other."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ckptguard.formats.structure import TensorPlace

_FILE_ROLES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), role)
    for pattern, role in (
        (r"training_args\.bin|.*\.index\.json|.*config\.json", "other"),
        (r"(?:optimizer|optim)(?:[-_.].*)?|.*optim_states\.pt", "optimizer"),
        (r"(?:lr_)?scheduler(?:[-_.].*)?", "scheduler"),
        (r"(?:grad_|loss_)?scaler(?:[-_.].*)?", "scaler"),
        (r"(?:rng_state|random_states?|rng)(?:[-_.].*)?", "rng"),
        (r"(?:sampler|dl_state_dict|dataloader)(?:[-_.].*)?", "data"),
        (r"ema(?:[-_.].*)?", "ema"),
        (r"(?:pytorch_)?model(?:[-_.].*)?|adapter_model\..*", "model"),
    )
)

_KEY_ROLES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), role)
    for pattern, role in (
        (r"(?:opt|optim|optimizer)s?(?:_?\d+)?(?:_states?)?(?:_dict)?", "optimizer"),
        (r"(?:lr_?)?(?:scheduler|sched)s?(?:_states?)?(?:_dict)?", "scheduler"),
        (r"(?:grad_?|loss_?|amp_?)?scaler(?:_state)?(?:_dict)?|amp", "scaler"),
        (r"(?:.*_)?rng(?:_states?)?|random_states?|numpy|python|cuda_rng.*", "rng"),
        (r"(?:data_?loader|sampler|data)(?:_state)?(?:_dict)?", "data"),
        (r"(?:model_?)?ema(?:_.*)?", "ema"),
        (r"(?:model|module|net|network|state_dict|weights|params)(?:_states?)?(?:_dict)?", "model"),
        (r"callbacks|loops|hyper_parameters|hparams.*|args|config|metrics|best_.*|log_history", "other"),
    )
)


def file_role(key: str) -> str:
    """The role that a file's name states; "" where it states none."""
    name = key.rpartition("/")[2].lower()
    return next((role for pattern, role in _FILE_ROLES if pattern.fullmatch(name)), "")


def key_role(name: str) -> str:
    """The role that the first part of a dotted name states; "" where it states none."""
    first = name.partition(".")[0].lower()
    return next((role for pattern, role in _KEY_ROLES if pattern.fullmatch(first)), "")


def assign_roles(key: str, tensors: Sequence[TensorPlace], *, whole_file_is_model: bool) -> list[str]:
    """The role of each tensor of a file.

    A file's name decides where it can. Else, in files that may hold anything, the first key of a tensor's path does.
    What is left counts as weights, except 0-dim tensors that lie beside known subtrees (``{"model": ..., "best":
    tensor(inf)}``): those are "other".
    """
    stated = file_role(key)
    if stated not in ("", "model"):
        return [stated] * len(tensors)
    if whole_file_is_model:
        return ["model"] * len(tensors)
    by_key = [key_role(t.name) for t in tensors]
    nested = any(r and "." in t.name for r, t in zip(by_key, tensors, strict=True))
    if not nested:
        return ["model"] * len(tensors)
    lone = {t.name for t in tensors if not t.shape and "." not in t.name}
    return [r or ("other" if t.name in lone else "model") for r, t in zip(by_key, tensors, strict=True)]
