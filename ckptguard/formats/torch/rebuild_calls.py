"""How torch's pickles describe tensors: storages by persistent id, and calls that view them.

Some tensors are made of others: sparse, nested, quantised, distributed ones, and subclasses that wrap some.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from ckptguard.formats.dtypes import DTYPES, ELEMENTS_PER_BYTE, STORAGE_DTYPES, is_countable
from ckptguard.formats.pickle.arguments import shape_of
from ckptguard.formats.pickle.inert_values import Call, Global, PersistentId, Sequence

_QUANTISED = "torch._utils._rebuild_qtensor"
_VIEWS = ("torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2", _QUANTISED)
_NEVER_QUANTISED = frozenset(_VIEWS[:2])
_TYPED_VIEW = "torch._utils._rebuild_tensor_v3"
_META = "torch._utils._rebuild_meta_tensor_no_storage"
_PARAMETERS = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
_FROM_TYPE = ("torch._tensor._rebuild_from_type_v2", "torch._tensor._rebuild_from_type")
_WITH_STATE = frozenset((_PARAMETERS[1], *_FROM_TYPE))
_TENSORS_THEMSELVES = frozenset((*_VIEWS, _TYPED_VIEW, _META))
_TENSORS = frozenset((*_VIEWS, _TYPED_VIEW, _META, *_PARAMETERS))
_GRADIENT_AT = {**dict.fromkeys((_VIEWS[1], _TYPED_VIEW), 4), _QUANTISED: 5, **dict.fromkeys(_PARAMETERS, 1)}
_WHOLE = ("int", "uint", "bool", "qint", "quint")
_SPARSE = "torch._utils._rebuild_sparse_tensor"
_NESTED = "torch._utils._rebuild_nested_tensor"
_WRAPPER = "torch._utils._rebuild_wrapper_subclass"
_OF_DEVICES = (
    "torch._utils._rebuild_device_tensor_from_cpu_tensor",
    "torch._utils._rebuild_device_tensor_from_numpy",
    "torch._utils._rebuild_xla_tensor",
)
_BY_COLUMNS = (("torch.sparse_csc",), ("torch.sparse_bsc",))
_MAX_WRAPPERS = 16
_MAX_DIMENSIONS = 64
_LIMIT = 2**63


Described = Call | PersistentId  # a pickle's substitute for a tensor


class StorageRef(NamedTuple):
    """A storage that a pickle refers to: its key and its expected size in bytes.

    Files of the oldest torch refer to `room` bytes of it from `first` on; otherwise that is all of it.
    """

    key: str
    length: int
    first: int
    room: int


class TensorRef(NamedTuple):
    """A tensor as its pickle describes it: elements `start`..`stop` of a storage (None: no stored bytes).

    `strides` are set only if its elements are not in row-major order without gaps.
    """

    dtype: str
    shape: tuple[int, ...]
    storage: StorageRef | None
    start: int
    stop: int
    strides: tuple[int, ...] = ()


class TensorProblem(ValueError):
    """An impossible description; the message says why. `sizes`: expected and found, if they differ."""

    sizes: tuple[str | None, str | None] = (None, None)


class Composite(NamedTuple):
    """`parts` by their names within the tensor ("" for the tensor itself), and the `states` set on it."""

    parts: tuple[tuple[str, object], ...]
    states: tuple[object, ...]


def is_tensor(value: Described) -> bool:
    """True if loading this would make a tensor of stored elements, or a bare storage."""
    if type(value) is PersistentId:
        return type(value.value) is tuple and len(value.value) >= 5 and value.value[0] == "storage"
    func = _unwrap(value).func if type(value) is Call else None
    return type(func) is Global and func.dotted in _TENSORS


def is_untyped(value: Described) -> bool:
    """True if it is a bare storage that does not state its element type."""
    if type(value) is not PersistentId or not is_tensor(value):
        return False
    kind = value.value[1]  # type: ignore[index]
    return type(kind) is Global and kind.name == "UntypedStorage"


def is_plain(call: Call) -> bool:
    """True if it is only a tensor of stored elements, as nearly all of them are."""
    return call.state is None and type(call.func) is Global and call.func.dotted in _NEVER_QUANTISED


def packed_storage(value: Described) -> tuple[Call, str] | None:
    """Return the file in memory that a plain pickle has instead of a tensor's storage, or None.

    The dtype comes with it if the storage itself states none.
    """
    call = _unwrap(value) if type(value) is Call else None
    args = call.args if call is not None else None
    first = args[0] if type(args) is tuple and args else None
    if call is None or type(first) is not Call or not first.calls("torch.storage._load_from_bytes"):
        return None
    typed = call.calls(_TYPED_VIEW) and type(args) is tuple and len(args) > 6
    return first, _dtype_of(args[6]) if typed and type(args[6]) is Global else ""  # type: ignore[index]


def is_whole_tensor(value: object) -> bool:
    """True if it is only a tensor of whole numbers."""
    if type(value) is not Call or not is_plain(value) or value.flat:
        return False
    try:
        return DTYPES[as_tensor(value).dtype].float is None
    except TensorProblem:
        return False


def tensor_attributes(call: Call) -> list[object]:
    """Return what is set on a tensor besides its elements: the states of its wrappers."""
    if call.state is None and type(call.func) is Global and call.func.dotted in _TENSORS_THEMSELVES:
        return []
    states: list[object] = []
    for layer in _layers(call):
        func, args = layer.func, layer.args
        if layer.state is not None:
            states.append(layer.state)
        if type(func) is Global and func.dotted in _WITH_STATE and type(args) is tuple and len(args) > 3:
            states.append(args[3])
    return states


def as_tensor(value: Described) -> TensorRef:
    """Return the description. TensorProblem if it contradicts itself or reaches beyond its storage."""
    if type(value) is PersistentId:
        whole, kind = as_storage(value)
        size = DTYPES[kind].size
        first, count = whole.first // size, whole.room // size
        return TensorRef(kind, (count,), whole, first, first + count) if count else TensorRef(kind, (0,), None, 0, 0)
    assert type(value) is Call
    ref = _viewed(_unwrap(value))
    if ref.dtype.startswith(_WHOLE) and any(_needs_gradient(layer) for layer in _layers(value)):
        raise TensorProblem("it requires a gradient, which whole numbers cannot have")
    return ref


def _needs_gradient(layer: Call) -> bool:
    at = _GRADIENT_AT.get(layer.func.dotted) if type(layer.func) is Global else None
    return at is not None and type(layer.args) is tuple and layer.args[at : at + 1] == (True,)


def is_learnt(call: Call) -> bool:
    """True if loading this would make a tensor that requires a gradient."""
    return any(_needs_gradient(layer) for layer in (_layers(call) if not is_plain(call) else (call,)))


def stated_sizes(call: Call) -> tuple[object, ...] | None:
    """Return the sizes of a tensor of stored elements as its pickle states them; None if it states none."""
    viewed = _unwrap(call)
    at = 1 if viewed.calls(_META) else 2
    stated = viewed.args[at : at + 1] if type(viewed.args) is tuple else ()
    sizes = stated[0] if stated else None
    if type(sizes) is Call and type(sizes.args) is tuple and len(sizes.args) == 1:
        sizes = sizes.args[0]
    return sizes if type(sizes) is tuple else None


def is_of_floats(call: Call) -> bool:
    """True if it is a tensor of floats, as far as it can be read."""
    try:
        known = DTYPES.get(as_tensor(call).dtype)
    except TensorProblem:
        return False
    return known is not None and known.float is not None


def is_meta(value: Described) -> bool:
    """True if it is a tensor that was saved without its elements."""
    return type(value) is Call and _unwrap(value).calls(_META)


def _viewed(call: Call) -> TensorRef:
    args = call.args
    if type(args) is not tuple or type(call.func) is not Global:
        raise TensorProblem("it has no arguments")
    if call.func.dotted in _PARAMETERS:
        raise TensorProblem("it is a parameter without a tensor")
    if call.func.dotted == _META:
        if len(args) < 2:
            raise TensorProblem("it has too few arguments")
        shape = _sizes(args[1])
        _check_count(shape)
        return TensorRef(_dtype_of(args[0]), shape, None, 0, 0)
    typed = call.func.dotted == _TYPED_VIEW
    if len(args) < (7 if typed else 4):
        raise TensorProblem("it has too few arguments")
    storage, storage_dtype = as_storage(args[0])
    dtype = _dtype_of(args[6]) if typed else storage_dtype
    if call.func.dotted == _QUANTISED and not dtype.startswith("q"):
        raise TensorProblem("it is quantised, but its storage is not")
    if call.func.dotted == _QUANTISED and not _is_scaled(args[4:5], _sizes(args[2])):
        raise TensorProblem("its scales do not match its shape")
    return _view(dtype, storage, args[1], _sizes(args[2]), _sizes(args[3]))


def as_storage(value: object) -> tuple[StorageRef, str]:
    """Return the storage of a persistent id, and the dtype that its class states."""
    parts = value.value if type(value) is PersistentId else None
    if type(parts) is not tuple or len(parts) < 5 or parts[0] != "storage":
        raise TensorProblem("it does not refer to a storage")
    _, kind, key, _, count = parts[:5]
    known = type(kind) is Global and (kind.module == "torch" or kind.module.startswith("torch."))
    dtype = STORAGE_DTYPES.get(kind.name) if known else None
    if dtype is None or type(key) is not str:
        raise TensorProblem("its storage has an unknown type")
    if type(count) is not int or not 0 <= count < _LIMIT:
        raise TensorProblem("its storage has an impossible size")
    size = DTYPES[dtype].size
    first, room = 0, count
    if len(parts) > 5 and parts[5] is not None:
        view = parts[5]
        if type(view) is not tuple or len(view) != 3 or not all(type(n) is int for n in view[1:]):
            raise TensorProblem("its view of a storage cannot be read")
        first, room = view[1:]
        if first < 0 or room < 0 or first + room > count:
            raise TensorProblem("its view reaches beyond its storage")
    return StorageRef(key, count * size, first * size, room * size), dtype


def quantiser(value: Call) -> tuple[object, object] | None:
    """Return (scale, zero point) of a quantised tensor, or (scales, zero points) as tensors; None for others."""
    if type(value.func) is Global and value.func.dotted in _NEVER_QUANTISED:
        return None
    call = _unwrap(value)
    if not call.calls(_QUANTISED) or type(call.args) is not tuple or len(call.args) < 5:
        return None
    stated = call.args[4]
    return (stated[1], stated[2]) if type(stated) is tuple and len(stated) >= 3 else None


def _unwrap(call: Call) -> Call:
    """Return the call that views a storage, without parameters and tensor subclasses around it."""
    if type(call.func) is Global and call.func.dotted in _TENSORS_THEMSELVES:
        return call
    *_, innermost = _layers(call)
    return innermost


def _layers(call: Call) -> Iterator[Call]:
    """Yield the call, and those that parameters and tensor subclasses wrap in each other."""
    yield call
    for _ in range(_MAX_WRAPPERS):
        inner = _inside(call)
        if inner is None:
            break
        call = inner
        yield call


def _inside(call: Call) -> Call | None:
    """Return the call that a parameter or a tensor subclass wraps, or None."""
    func, args = call.func, call.args
    if type(func) is not Global or type(args) is not tuple or not args:
        return None
    inner = args[0]
    if func.dotted in _PARAMETERS and type(inner) is Call:
        return inner
    if func.dotted in _FROM_TYPE and type(inner) is Global and len(args) > 2:
        return Call(inner, args[2])
    return None


def _view(
    dtype: str, storage: StorageRef, offset: object, shape: tuple[int, ...], stride: tuple[int, ...]
) -> TensorRef:
    if type(offset) is not int or not 0 <= offset < _LIMIT or len(stride) != len(shape):
        raise TensorProblem("its offset or strides are impossible")
    if 0 in shape:
        _check_count(shape)
        return TensorRef(dtype, shape, None, 0, 0)
    strides: tuple[int, ...] = ()
    if _is_row_major(shape, stride):
        stop = offset + math.prod(shape)
    else:
        _check_count(shape)
        stop = offset + 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        strides = stride
    known = DTYPES.get(dtype)
    if known is None:
        return TensorRef(dtype, shape, storage, 0, 0)
    if dtype in ELEMENTS_PER_BYTE:
        offset, stop = offset // ELEMENTS_PER_BYTE[dtype], -(-stop // ELEMENTS_PER_BYTE[dtype])
    if stop * known.size > storage.room:
        raise TensorProblem(f"it reaches to byte {stop * known.size} of a storage of {storage.room} bytes")
    first = storage.first // known.size
    return TensorRef(dtype, shape, storage, first + offset, first + stop, strides)


def _is_scaled(stated: tuple[object, ...], shape: tuple[int, ...]) -> bool:
    """True if there is a scale, or one for each index of an axis."""
    if not stated or type(stated[0]) is not tuple or len(stated[0]) != 4:
        return True
    _, *parts, axis = stated[0]
    lengths = [(len(p.items),) if type(p) is Sequence else shape_of(p) for p in parts]
    return type(axis) is int and 0 <= axis < len(shape) and lengths == [(shape[axis],)] * 2


def _check_count(shape: tuple[int, ...]) -> None:
    if len(shape) > 1 and not is_countable(shape):
        raise TensorProblem("it has more elements than can be counted")


def _is_row_major(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """True if the elements follow each other in the order of their indices."""
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size > 1:
            if step != expected:
                return False
            expected *= size
    return True


def _dtype_of(value: object) -> str:
    if type(value) is not Global or value.module != "torch":
        raise TensorProblem("its dtype cannot be read")
    return value.name


def _sizes(value: object) -> tuple[int, ...]:
    if type(value) is Call and value.calls("torch.Size") and type(value.args) is tuple and len(value.args) == 1:
        value = value.args[0]
    if type(value) is not tuple or len(value) > _MAX_DIMENSIONS:
        raise TensorProblem("its shape or strides cannot be read")
    for number in value:
        if type(number) is not int or not 0 <= number < _LIMIT:
            raise TensorProblem("its shape or strides are impossible")
    return value


def as_composite(call: Call) -> Composite | None:
    """Return the parts of the tensor that this call would make; None if it makes none, or a plain one."""
    func, args = call.func, call.args
    if type(func) is not Global or type(args) is not tuple or is_tensor(call):
        return None
    states: tuple[object, ...] = () if call.state is None else (call.state,)
    if func.dotted in _FROM_TYPE and len(args) > 2:
        states += args[3:4]
        func, args = args[0], args[2]
        if type(func) is not Global or type(args) is not tuple:
            return None
        if func.dotted == _WRAPPER:  # it only makes the shell for the state
            return Composite((), states)
        return Composite(_parts(func.dotted, args) or (("", args),), states)
    if func.dotted == _PARAMETERS[1]:
        states += args[3:4]
    parts = _parts(func.dotted, args)
    return None if parts is None else Composite(parts, states)


def _parts(dotted: str, args: tuple[object, ...]) -> tuple[tuple[str, object], ...] | None:
    if not args:
        return None
    if dotted in _PARAMETERS or dotted in _OF_DEVICES:
        return (("", args[0]),)
    if dotted == _NESTED and len(args) == 4:
        return tuple(zip(("values", "sizes", "strides", "offsets"), args, strict=True))
    if dotted == _SPARSE and len(args) == 2 and type(args[1]) is tuple:
        layout, data = args[0], args[1]
        if len(data) >= 3 and type(data[2]) is Call and is_tensor(data[2]):
            by_columns = type(layout) is Call and type(layout.args) is tuple and layout.args[:1] in _BY_COLUMNS
            names = ("ccol_indices", "row_indices") if by_columns else ("crow_indices", "col_indices")
            return tuple(zip((*names, "values"), data, strict=False))
        return tuple(zip(("indices", "values"), data, strict=False))
    return None
