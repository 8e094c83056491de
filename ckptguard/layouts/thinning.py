"""What thinning takes from a checkpoint: the files that only a resume needs, and such entries of other files. Names and
the manifest alone decide.

The rest stays: weights, config, tokenizer, trainer state, metrics, random states. What is left of a Trainer's folder is
what the Trainer itself writes with ``save_only_model``, so the tiny state of the scheduler goes, too: beside weights
alone, a Trainer takes it for a sign of a save that lost its optimizer. In the other layouts only optimizer state goes.
Its entry goes whole, because loaders that need it then say so: Lightning resumes with an empty one without a word. Of
an entry of another name only the ``state`` of an optimizer goes. torch's optimizers say so, too, if that is not there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence

import msgspec

from ckptguard.decisions.known_good import series_head_of
from ckptguard.formats import tensor_suffix
from ckptguard.formats.table import is_dcp_metadata
from ckptguard.layouts.deepspeed import MODEL_STATES
from ckptguard.layouts.roles import WRAPPERS, file_role, key_role
from ckptguard.values.ids import escape
from ckptguard.values.manifest import File, Manifest, Tensor

_OPTIMIZER, _OWN = "optimizer", "ckptguard"
_TAKEN = {
    "hf-trainer": (_OPTIMIZER, "scheduler", "scaler"),
    "accelerate": (_OPTIMIZER, "scheduler", "scaler"),
    "deepspeed": (_OPTIMIZER,),
    "lightning": (_OPTIMIZER,),
    "folder": (_OPTIMIZER,),
    _OWN: (_OPTIMIZER,),
}
_WITH_ENTRIES = (
    "lightning",
    "folder",
    _OWN,
    "file",
    "wenet",
    "megatron",
    "dcp",
)  # their files may be written anew
_ANEW = ("torch_zip", "distcp")
_WEIGHTS = ("model", "ema", "")
_SMALL = ("scheduler", "scaler")
_FSDP = re.compile(r"optimizer_\d+/(?:\.metadata|__\d+_\d+\.distcp)")  # Accelerate's sharded optimizer state
_MOMENTS = (
    r"(?:max_)?exp_avgs?(?:_(?:sqs?|var|inf|slow|fast|diff|res|row|col))*|momentum_buffer"
    r"|square_avg|grad_avg|acc_delta|sum|state[12]|absmax[12]|qmap[12]"
)
# What optimizers name: by the number of a parameter, or by the name of their own tensor after that of a parameter.
_STATE = re.compile(
    r"(?:^|\.)state\.\d+\.(?!(?:weight|bias)$)|(?:^|\.)(?:max_)?(?:exp_avg\w*|momentum_buffer)(?:\.|$)"
    rf"|^state\..+\.(?:step|{_MOMENTS})$"
)
_MOMENT = re.compile(rf"\.(?:{_MOMENTS})$")
# Averages of weights that an optimizer keeps: NeMo's, torch's ASGD, SWA, Lookahead, the schedule-free ones.
_AVERAGE = re.compile(
    r"\.(?:ema|ema_(?:weights|params|model|state_dict)|shadow_\w+|swa_\w+|slow_\w+)(?:\.|$)|\.(?:ax|z)$"
)
_ALSO_A_MODEL = re.compile(r"opts?(?:_?\d+)?", re.IGNORECASE)  # OPT
_DEEPEST = 3  # keys that lead to an entry: of a wrapper, of what is in it, and its state
_IN_SHARDS = "its weights are in the optimizer's shards (DeepSpeed ZeRO-3)"
_IN_ONE_FILE = "its optimizer state is in the same files as its weights, and no entry there is the optimizer's alone"
_LEGACY = "its optimizer state is in a file of the format that torch wrote before 1.6, which is not written anew"
_UNKNOWN = "nobody knows which of its files a loader needs"

Place = tuple[str, ...]  # an entry of nested dicts, by the keys that lead there


class Anew(msgspec.Struct, frozen=True):
    """A file that is to be written anew without some entries. `tensors` stay."""

    file: File
    places: frozenset[Place]
    tensors: tuple[Tensor, ...]

    @property
    def bytes(self) -> int:
        """The bytes of tensors that go; those around them are few."""
        kept = {tensor.span for tensor in self.tensors}
        return sum(span.length for number, span in enumerate(self.file.spans) if number not in kept)


class Split(msgspec.Struct, frozen=True):
    """The files that go, those that are written anew, and those that stay; if all stay, `why` says why, "" if there is
    nothing to take."""

    goes: tuple[File, ...] = ()
    stays: tuple[File, ...] = ()
    anew: tuple[Anew, ...] = ()
    why: str = ""

    @property
    def takes(self) -> tuple[File, ...]:
        """The files of which something goes."""
        return (*self.goes, *(one.file for one in self.anew))


def split_for_thinning(manifest: Manifest) -> Split:
    """Say which files of a checkpoint thinning takes away, and which entries of others. None goes that holds a
    weight."""
    goes = [file for file in manifest.files if _is_for_resume(manifest, file)]
    if any((m := MODEL_STATES.fullmatch(f.path.rpartition("/")[2])) and m["dp"] for f in manifest.files):
        return Split(why=_IN_SHARDS)
    for file in goes:
        if any(_may_be_weight(tensor, tensor.name.partition(".")[0]) for tensor in file.tensors):
            return Split(why=f"{escape(file.path.rpartition('/')[2])} holds tensors that may be weights")
    anew = tuple(_anew(manifest, goes)) if manifest.layout in _WITH_ENTRIES else ()
    taken = {file.path for file in goes} | {one.file.path for one in anew}
    stays = tuple(file for file in manifest.files if file.path not in taken)
    if not taken:
        has_optimizer = series_head_of(manifest).has_optimizer
        is_legacy = any(file.format == "torch_legacy" for file in manifest.files)
        return Split(why="" if not has_optimizer else _LEGACY if is_legacy else _IN_ONE_FILE)
    left = (*stays, *(msgspec.structs.replace(one.file, tensors=one.tensors) for one in anew))
    if not series_head_of(msgspec.structs.replace(manifest, files=left)).has_weights:
        return Split(why="nothing with weights would stay")
    if not any(t.span is not None and f.spans[t.span].length for f in left for t in f.tensors if t.role in _WEIGHTS):
        return Split(why="no weights with bytes would stay")
    return Split(tuple(goes), stays, anew)


def why_never(layout: str) -> str:
    """Return why no checkpoint of a layout is thinned, "" if some are."""
    return "" if layout in _TAKEN or layout in _WITH_ENTRIES else _UNKNOWN


def without_resume_state(manifest: Manifest) -> Manifest:
    """Return what would be left of a manifest, to compare something thinned with it."""
    split = split_for_thinning(manifest)
    if manifest.layout == _OWN and not split.takes:  # a guard may have left the optimizer out of a file of all tensors
        files = [f for f in manifest.files if file_role(f.path) != _OPTIMIZER]
        kept = ((f, tuple(t for t in f.tensors if t.role != _OPTIMIZER)) for f in files)
        return msgspec.structs.replace(
            manifest, files=tuple(f if own == f.tensors else msgspec.structs.replace(f, tensors=own) for f, own in kept)
        )
    anew = (msgspec.structs.replace(one.file, tensors=one.tensors) for one in split.anew)
    return msgspec.structs.replace(manifest, files=(*split.stays, *anew)) if split.takes else manifest


def roles_taken(paths: Iterable[str]) -> tuple[str, ...]:
    """Return the roles of what was taken away with files, or from them: optimizer, scheduler, scaler."""
    return tuple(sorted({role if (role := file_role(path)) in _SMALL else _OPTIMIZER for path in paths}))


def _anew(manifest: Manifest, goes: Collection[File]) -> Iterator[Anew]:
    """Yield the files of which only some entries go. What one of torch.distributed.checkpoint's describes is one
    state."""
    states: dict[str, list[File]] = {}
    for file in manifest.files:
        if file.format in _ANEW and file not in goes:
            state = file.path if file.format == "torch_zip" else file.path.rpartition("/")[0]
            states.setdefault(state, []).append(file)
    for state, files in states.items():
        places = _places([tensor for file in files for tensor in file.tensors])
        described = [f for f in manifest.files if is_dcp_metadata(f.path) and f.path.rpartition("/")[0] == state]
        for file in (*files, *described) if places else ():
            tensors = tuple(tensor for tensor in file.tensors if not is_in(tensor.name, places))
            if len(tensors) < len(file.tensors) or file in described:
                yield Anew(file, places, tensors)


def _places(tensors: Iterable[Tensor]) -> frozenset[Place]:
    """Return the entries whose tensors are all an optimizer's: those with its name, and any other's ``state`` that has
    moments. What else is in such another one stays."""
    inside: dict[Place, list[Tensor]] = {}
    for tensor in tensors:
        keys = tensor.name.split(".", _DEEPEST)
        depth = 2 if keys[0] in WRAPPERS else 1
        if len(keys) > depth and key_role(keys[depth - 1]) != _OPTIMIZER:
            depth = depth + 1 if keys[depth] == "state" else len(keys)
        if len(keys) > depth:
            inside.setdefault(tuple(keys[:depth]), []).append(tensor)
    return frozenset(place for place, own in inside.items() if _are_optimizers(place[-1], own))


def _are_optimizers(entry: str, own: Sequence[Tensor]) -> bool:
    large = [tensor for tensor in own if math.prod(tensor.shape) > 1]
    if not large or any(_may_be_weight(tensor, entry) for tensor in large):
        return False
    if key_role(entry) == _OPTIMIZER:  # and no module of a model has this name
        return not any(tensor.role in _WEIGHTS for tensor in large)
    return any(_MOMENT.search(tensor.name) for tensor in large)


def is_in(name: str, places: Collection[Place]) -> bool:
    """True if a dotted name is below one of these entries."""
    keys = tuple(name.split(".", _DEEPEST))
    return any(keys[:depth] in places for depth in range(1, len(keys)))


def _is_for_resume(manifest: Manifest, file: File) -> bool:
    inside = file.path.removeprefix(manifest.path + "/")
    taken = _TAKEN.get(manifest.layout, ())
    if inside == file.path or not taken:  # the checkpoint itself, or a file beside it
        return False
    if _FSDP.fullmatch(inside) and manifest.layout in ("hf-trainer", "accelerate"):
        return True
    role = file_role(inside)
    if role != _OPTIMIZER and "/" in inside:  # a part of a pipeline has a scaler or a scheduler that it is used with
        return False
    return role in taken and tensor_suffix(inside) and not any(t.role in _WEIGHTS for t in file.tensors)


def _may_be_weight(tensor: Tensor, entry: str) -> bool:
    """True unless the name of its entry, or its own, is one of an optimizer, or it is one number: the file's name alone
    does not say it. An optimizer may keep an average of the weights, which nothing else has."""
    if math.prod(tensor.shape) <= 1:
        return False
    is_named = key_role(entry) == _OPTIMIZER and not _ALSO_A_MODEL.fullmatch(entry)
    is_optimizers = is_named or _STATE.search(tensor.name) is not None
    return not is_optimizers or _AVERAGE.search(tensor.name) is not None
