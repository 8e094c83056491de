"""From tensors as a pickle describes them to where their elements lie in the file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ckptguard.formats.pickle.inert_values import Call, PersistentId
from ckptguard.formats.structure import Problem, TensorPlace
from ckptguard.formats.torch.rebuild_calls import TensorProblem, as_tensor


class StorageSpan(NamedTuple):
    """A storage that the file holds: its span (None: it is empty) and its length in bytes."""

    span: int | None
    length: int


def place_tensors(
    found: Iterable[tuple[str, Call | PersistentId]],
    stored: Mapping[str, StorageSpan],
    byte_order: str,
    problems: list[Problem],
) -> list[TensorPlace]:
    """The tensors whose elements are where they should be; for each of the others a problem that names it."""
    placed = []
    for name, call in found:
        place = _place(name, call, stored, byte_order)
        if isinstance(place, Problem):
            problems.append(place)
        else:
            placed.append(place)
    return placed


def _place(
    name: str, call: Call | PersistentId, stored: Mapping[str, StorageSpan], byte_order: str
) -> TensorPlace | Problem:
    try:
        tensor = as_tensor(call)
    except TensorProblem as error:
        return Problem(message=f"tensor {name!r}: {error}", tensor=name)
    if tensor.storage is None:
        return TensorPlace(name, tensor.dtype, tensor.shape, None, 0, 0, "", byte_order)
    storage = stored.get(tensor.storage.key)
    if storage is None:
        return Problem(message=f"tensor {name!r}: its storage is not in the file", tensor=name)
    if storage.length != tensor.storage.length:
        return Problem(
            message=f"tensor {name!r}: its storage has another size than the pickle says",
            tensor=name,
            expected=str(tensor.storage.length),
            found=str(storage.length),
        )
    return TensorPlace(
        name, tensor.dtype, tensor.shape, storage.span, tensor.start, tensor.stop, "", byte_order, tensor.strides
    )
