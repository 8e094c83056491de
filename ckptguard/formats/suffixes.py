"""What a file's name says about its format. A name alone never makes a file good or bad."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptguard.formats.structure import Format

_WITHOUT_TENSORS = ("training_args.bin",)
_DCP_METADATA = re.compile(r"(?:__\d+)?\.metadata")  # one for all ranks, or each rank its own
_STATE_WORDS = re.compile(
    r"model|optim|adapter|weight|state|checkpoint|ckpt|lora|ema(?![a-z])|scaler|scheduler|sampler|consolidated|params"
    r"|embed|unet|vae|encoder|decoder|pytorch|training_args|shard"
)
# Arrays are often data beside a checkpoint: only these words make one of them the state of training.
_NUMPY_STATE = re.compile(
    r"model|optim|adapter|weight|checkpoint|ckpt|lora|params|(?:^|[^a-z])(?:ema(?![a-z])|(?:step|iter|epoch)[-_=.]?\d)"
)


def name_of(path: str) -> str:
    """The last part of a path, in lower case."""
    return path.rpartition("/")[2].lower()


def suffixes_of(*holds: str) -> tuple[str, ...]:
    """The suffixes of all formats whose files hold one of these, as the table of formats says; the longest first."""
    import ckptguard.formats as formats  # it imports the formats, which import this

    global _derived
    if _derived[0] is not formats.FORMATS:
        _derived = (formats.FORMATS, {})
    rows, known = _derived
    if holds not in known:
        found = {suffix for row in rows if row.holds in holds for suffix in row.suffixes}
        known[holds] = tuple(sorted(found, key=lambda suffix: (-len(suffix), suffix)))
    return known[holds]


_derived: tuple[tuple[Format, ...], dict[tuple[str, ...], tuple[str, ...]]] = ((), {})


def has_tensor_suffix(path: str) -> bool:
    """Whether files of this suffix usually hold tensors (training_args.bin has the suffix, but none)."""
    return name_of(path).endswith(suffixes_of("tensors", "pieces"))


def tensor_suffix(path: str) -> bool:
    """Whether a checkpoint cannot do without a file of this name, judged by the name alone."""
    name = name_of(path)
    if name.endswith(suffixes_of("arrays")):
        return _NUMPY_STATE.search(name) is not None
    return (has_tensor_suffix(path) and name not in _WITHOUT_TENSORS) or is_dcp_metadata(path)


def is_dcp_metadata(path: str) -> bool:
    """Whether the name is that of what explains torch.distributed.checkpoint's ``.distcp`` files."""
    return _DCP_METADATA.fullmatch(name_of(path)) is not None


def may_be_foreign(path: str) -> bool:
    """Whether a name says nothing but ``.bin``, as token files and vocabularies do too."""
    name = name_of(path)
    return name.endswith(".bin") and not _STATE_WORDS.search(name)


def is_pickle_name(path: str) -> bool:
    """Whether the name is that of a pickle."""
    return name_of(path).endswith(suffixes_of("objects"))
