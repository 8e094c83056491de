"""Find the tensors of a pickle in the storages of the file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from ckptguard.formats.pickle.arguments import is_device
from ckptguard.formats.pickle.inert_values import Global, PersistentId
from ckptguard.formats.strict_json import printable
from ckptguard.formats.structure import Problem, TensorPlace
from ckptguard.formats.torch.rebuild_calls import Described, StorageRef, TensorProblem, as_storage, as_tensor, is_meta


class StorageSpan(NamedTuple):
    """A storage in the file: its span (None: it is empty) and its length in bytes."""

    span: int | None
    length: int


def place_tensors(
    found: Iterable[tuple[str, Described]],
    references: Iterable[PersistentId],
    stored: Mapping[str, StorageSpan],
    byte_order: str,
    problems: list[Problem],
) -> list[TensorPlace]:
    """Return the tensors whose elements are in the right place. Each of the others is a problem that names it.

    The same goes for `references` to storages that no tensor needs, because loading creates all of them.
    """
    placed, looked_at = [], set[str]()
    for name, call in found:
        try:
            ref = as_tensor(call)
            span = None
            if ref.storage is not None:
                looked_at.add(ref.storage.key)
                span = _span_of(ref.storage, stored)
            elif is_meta(call):
                problems.append(Problem(f"tensor {name!r} was saved without its elements", tensor=name, doubt=True))
        except TensorProblem as error:
            expected, length = error.sizes
            message = f"tensor {name!r}: {error}"
            problems.append(Problem(message, tensor=name, expected=expected, found=length))
            continue
        placed.append(TensorPlace(name, ref.dtype, ref.shape, span, ref.start, ref.stop, "", byte_order, ref.strides))
    problems += _of_references(references, stored, looked_at)
    return placed


def _of_references(
    references: Iterable[PersistentId], stored: Mapping[str, StorageSpan], looked_at: set[str]
) -> Iterator[Problem]:
    """Yield what is wrong with the references themselves. torch creates each storage from the first one."""
    first: dict[object, tuple[object, object]] = {}
    devices: set[object] = set()
    for reference in references:
        parts = reference.value
        try:
            if type(parts) is not tuple or len(parts) < 5 or type(parts[1]) is not Global or type(parts[2]) is not str:
                if type(parts) is tuple and parts[:1] == ("module",):
                    continue  # of an old file: a module's class, with its source
                as_storage(reference)
                raise TensorProblem("it does not refer to a storage")
            _, kind, key, device, count, *_ = parts
            if first.setdefault(key, (kind.name, count)) != (kind.name, count):
                yield Problem(f"storage {printable(key, 200)!r} is described as two kinds", doubt=True)
            if device not in devices:
                devices.add(device)
                if not is_device(device) or device == "meta":
                    yield Problem("a storage is on a device that is not known to hold numbers", doubt=True)
            if key not in looked_at:
                looked_at.add(key)
                _span_of(as_storage(reference)[0], stored)
        except TensorProblem as error:
            yield Problem(f"a reference to a storage: {error}")


def _span_of(storage: StorageRef, stored: Mapping[str, StorageSpan]) -> int | None:
    found = stored.get(storage.key)
    if found is None:
        raise TensorProblem("its storage is not in the file")
    if found.length != storage.length:
        problem = TensorProblem("its storage has another size than in the pickle")
        problem.sizes = (str(storage.length), str(found.length))
        raise problem
    return found.span
