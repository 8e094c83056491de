"""The purpose of a file or a tensor: model, optimizer, ema, scheduler, scaler, rng, data, other."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Sequence

import msgspec

from ckptguard.formats.dtypes import DTYPES
from ckptguard.formats.structure import TensorPlace

_FILE_ROLES = (
    (r"training_args\.bin|.*\.index\.json|.*config\.json", "other"),
    (r"(?:rank\d+-of-\d+-)?(?:optimizer|optim)(?:[-_.].*)?|.*optim_states\.pt", "optimizer"),
    (r"(?:lr_)?scheduler(?:[-_.].*)?", "scheduler"),
    (r"(?:grad_|loss_)?scaler(?:[-_.].*)?", "scaler"),
    (r"(?:rng_state|random_states?|rng)(?:[-_.].*)?", "rng"),
    (r"(?:sampler|dl_state_dict|dataloader|dataset)(?:[-_.].*)?", "data"),
    (r"ema(?:[-_.].*)?", "ema"),
    (r"(?:pytorch_)?model(?:[-_.].*)?|adapter_model\..*", "model"),
)

# No trainer would load optimizer.bin.old as optimizer state.
_PUT_ASIDE = (".old", ".bak", ".orig", ".md5", ".sha256", ".txt", "~")

_KEY_ROLES = (
    (r"(?:opt|optim|optimizer)s?(?:_?\d+)?(?:_states?)?(?:_dict)?", "optimizer"),
    (r"(?:lr_?|opt_param_)?(?:scheduler|sched)s?(?:_?\d+)?(?:_states?)?(?:_dict)?", "scheduler"),
    (r"(?:grad_?|loss_?|amp_?)?scaler(?:_state)?(?:_dict)?|amp", "scaler"),
    (r"(?:.*_)?rng(?:_states?)?|random_states?|numpy|python|cuda_rng.*", "rng"),
    (r"(?:train_?|val_?)?(?:data_?loader|(?:data_?)?sampler|data|dataset)(?:_state)?(?:_dict)?", "data"),
    (r"(?:model_?)?ema(?:_.*)?", "ema"),
    (r"(?:model|module|net|network|state_dict|weights|params)\d*(?:_states?)?(?:_dict)?", "model"),
    (r"callbacks|loops|hyper_parameters|hparams.*|args|config|metrics|best_.*|log_history", "other"),
)


def _any_of(rows: Iterable[tuple[str, str]]) -> re.Pattern[str]:
    """Return one pattern for all rows, with a group named as the role for each. The first row that fits is found."""
    return re.compile("|".join(f"(?P<{role}>{pattern})" for pattern, role in rows))


_FILE_ROLE, _KEY_ROLE = _any_of(_FILE_ROLES), _any_of(_KEY_ROLES)
STATE_ROLES = ("model", "optimizer", "ema")
# Names for the one object that holds model, optimizer and the rest, in torch's tutorials and common loops.
WRAPPERS = ("app", "app_state", "checkpoint", "ckpt", "state", "train_state")


def file_role(key: str) -> str:
    """Return the role in a file's name, or ""."""
    name = key.rpartition("/")[2].lower()
    if name.endswith(_PUT_ASIDE):
        return "other"
    match = _FILE_ROLE.fullmatch(name)
    return "" if match is None else match.lastgroup or ""


def is_put_aside(key: str) -> bool:
    """True if nobody loads the file as state any more (``optimizer.bin.old``)."""
    return key.lower().endswith(_PUT_ASIDE)


def key_role(name: str) -> str:
    """Return the role in a key, or "". A key with a dot has none."""
    match = None if "." in name else _KEY_ROLE.fullmatch(name.lower())
    return "" if match is None else match.lastgroup or ""


def place_role(name: str, containers: Collection[str]) -> str:
    """Return the role of the container of a dotted name, or "".

    Without containers a dot is only a letter: ``scaler.weight`` of a flat state dict is a weight. A container that only
    wraps all others (``app.optim.state...``) is ignored. An average of the weights is one anywhere
    (``callbacks.EMA.weights...``).
    """
    first, _, rest = name.partition(".")
    if not rest or first not in containers:
        return ""
    inner = rest.partition(".")[0]
    role = key_role(first) or (key_role(inner) if first in WRAPPERS and inner != rest else "")
    return "ema" if role == "other" and inner != rest and key_role(inner) == "ema" else role


def number_role(key: str, name: str, containers: Collection[str], members: Collection[str] = ()) -> str:
    """Return the role of a number beside tensors: from the file's name, its container, or its own key.

    `members` are the files in it, if it is an archive.
    """
    member, colon, inner = name.partition(":")
    if colon and member in members:
        return member_role(member) or number_role("", inner, _within(member, containers))
    stated = file_role(key)
    return stated if stated not in ("", "model") else place_role(name, containers) or key_role(name)


def is_float_matrix(tensor: TensorPlace) -> bool:
    """True for floats of two or more dimensions, of more than one element."""
    known = DTYPES.get(tensor.dtype)
    matrix = len(tensor.shape) > 1 and any(size != 1 for size in tensor.shape)
    return matrix and known is not None and known.float is not None


def member_role(name: str) -> str:
    """Return the role in the name of a file inside an archive, or "". There any part of the name says it
    (``policy.optimizer.pth``)."""
    parts = re.split(r"[^a-z]+", name.rpartition("/")[2].lower())
    return file_role(name) or ("optimizer" if not {"optimizer", "optim"}.isdisjoint(parts) else "")


def _within(member: str, containers: Collection[str]) -> list[str]:
    return [name[len(member) + 1 :] for name in containers if name.startswith(f"{member}:")]


def _roles_of_members(
    tensors: Sequence[TensorPlace], containers: Collection[str], members: Collection[str]
) -> Iterator[str]:
    for member, group in itertools.groupby(tensors, key=lambda t: t.name.partition(":")[0]):
        own = [msgspec.structs.replace(t, name=t.name.partition(":")[2]) for t in group]
        stated = member_role(member)
        known = stated not in ("", "model") or member not in members
        yield from [stated] * len(own) if known else assign_roles("", own, containers=_within(member, containers))


def assign_roles(
    key: str, tensors: Sequence[TensorPlace], *, containers: Collection[str], members: Collection[str] = ()
) -> list[str]:
    """Return the role of each tensor of a file: from the file's name, else from the tensor's container. In an archive
    each of its `members` is such a file.

    The rest counts as weights, with two exceptions beside containers. A 0-dim tensor without other tensors in its
    container (``{"model": ..., "best": tensor(inf)}``) is "other". A tensor without floats gets its key's role
    (``rng_state``).
    """
    if members:
        return list(_roles_of_members(tensors, containers, frozenset(members)))
    stated = file_role(key)
    if stated not in ("", "model"):
        return [stated] * len(tensors)
    nested = {c for c in containers if key_role(c) or c in WRAPPERS}
    holders = {_container(t.name, containers) for t in tensors if t.shape}
    if not nested and not holders.difference(("",)):
        return ["model"] * len(tensors)
    return [place_role(t.name, nested) or _lone_role(t, containers, nested, holders) for t in tensors]


def _container(name: str, containers: Collection[str]) -> str:
    """Return the top-level container of a dotted name, or ""."""
    first, _, rest = name.partition(".")
    return first if rest and first in containers else ""


def _lone_role(
    tensor: TensorPlace, containers: Collection[str], nested: Collection[str], holders: Collection[str]
) -> str:
    container = _container(tensor.name, containers)
    if container:
        return "model" if tensor.shape or container in holders or not holders else "other"
    if "." in tensor.name:
        return "model"
    if not nested:
        return "model" if tensor.shape or "" in holders else "other"
    known = DTYPES.get(tensor.dtype)
    stated = key_role(tensor.name) if known is not None and known.float is None else ""
    return stated or ("model" if tensor.shape else "other")
