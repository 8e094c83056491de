"""The possible arguments of a known call. Each function checks if a value, which nothing has made yet, is one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

from ckptguard.formats.dtypes import is_countable
from ckptguard.formats.pickle.inert_values import Call, Global, Kind, Mapping, PersistentId, Sequence, SetOf
from ckptguard.formats.pickle.long_values import LongBytes, LongText

Part = Callable[[object], bool]


class Row(NamedTuple):
    """The result of a call, the arguments it takes (None: any), and how many it needs.

    `made`: by a class, which NEWOBJ may name, too, and must if more arguments are needed than could be seen. `further`
    returns a doubt about arguments that are right individually. `state` checks what may be set on the result.
    """

    kind: Kind
    parts: tuple[Part | None, ...] = ()
    least: int = 0
    made: bool = False
    free: int = 0  # how many of the first arguments may be anything
    further: Callable[[tuple[Any, ...]], str | None] | None = None
    state: Part | None = None


_MAX_DIMENSIONS = 64
_MOST_MARKS = 4  # keys and values
_TOO_GREAT = 2**1023  # for a float
_UNHASHABLE = (Kind.MAPPING, Kind.LIST, Kind.SET, Kind.ARRAY, Kind.BYTES, Kind.HOOKS, Kind.RECORD)
_DEVICES = (
    "cpu cuda ipu xpu mkldnn opengl opencl ideep hip ve fpga maia xla lazy vulkan mps meta hpu mtia privateuseone"
    " npu mlu musa"
)
DEVICES = frozenset(_DEVICES.split())
_SPARSE = ("sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc")
LAYOUTS = frozenset(("strided", *_SPARSE, "_mkldnn", "jagged"))
_OF_TENSORS = (
    "H T _backward_hooks _base _cdata _grad _grad_fn _has_symbolic_sizes_strides _post_accumulate_grad_hooks"
    " _python_dispatch _version data device dtype grad grad_dtype grad_fn imag is_cpu is_cuda is_ipu is_leaf is_maia"
    " is_meta is_mkldnn is_mps is_mtia is_nested is_quantized is_sparse is_sparse_csr is_vulkan is_xla is_xpu itemsize"
    " layout mH mT name nbytes ndim output_nr real requires_grad retains_grad shape volatile"
)
_OF_TENSORS_ALONE = frozenset(_OF_TENSORS.split())


def look_at_keys(keys: Iterable[object], room: int) -> int | None:
    """Check the parts of these keys as Python hashes them, and return what is left of the room. None for an impossible
    key."""
    waiting = [key for key in keys if type(key) is not str]
    while waiting and room >= 0:
        value = waiting.pop()
        kind = type(value)
        if kind is tuple:
            waiting += cast("tuple[object, ...]", value)
            room -= len(cast("tuple[object, ...]", value))
        elif kind is Call:
            if value.kind in _UNHASHABLE:  # type: ignore[attr-defined]
                return None
        elif kind is Sequence or kind is Mapping or (kind is SetOf and not value.frozen):  # type: ignore[attr-defined]
            return None
    return room


def size_of(args: object) -> int:
    """Return about how much there is to check in the arguments of a call."""
    size = 0
    for part in args if type(args) is tuple else ():
        if type(part) is Sequence or type(part) is SetOf:
            size += len(part.items)
        elif type(part) is Mapping:
            size += len(part.flat)
        elif type(part) is tuple:
            size += len(part)
        elif type(part) is str:
            size += len(part) >> 6
    return size


def keys_of(call: Call) -> list[object]:
    """Return what a call that makes a dict or set puts into it first."""
    keys: list[object] = []
    if call.kind in (Kind.MAPPING, Kind.SET) or call.calls("builtins.frozenset"):
        for part in cast("tuple[object, ...]", call.args):
            items = part.items if type(part) is Sequence else part
            if isinstance(items, list | tuple):
                keys += items if call.kind is not Kind.MAPPING else [_items(pair)[0] for pair in items]
    return keys


def _items(pair: object) -> Any:
    return pair.items if type(pair) is Sequence else pair


def of_type(*kinds: type) -> Part:
    """Accept a value of one of these types."""
    return lambda part: type(part) in kinds


def call_of(*kinds: Kind) -> Part:
    """Accept the result of a call of one of these kinds."""
    return lambda part: type(part) is Call and part.kind in kinds


def sizes(part: object) -> bool:
    """Accept a shape, or strides."""
    if type(part) is Call:
        return part.calls("torch.Size")
    return type(part) is tuple and len(part) <= _MAX_DIMENSIONS and all(type(n) is int for n in part)


def integers(part: object) -> bool:
    """Accept a tuple or list of integers."""
    items = part.items if type(part) is Sequence else part
    return isinstance(items, list | tuple) and all(type(n) is int for n in items)


def octets(part: object) -> bool:
    """Accept integers that are bytes."""
    return integers(part) and all(0 <= n < 256 for n in cast("list[int]", getattr(part, "items", part)))


def hooks(part: object) -> bool:
    """Accept None, or an OrderedDict that is and stays empty."""
    if part is None:
        return True
    if type(part) is not Call or part.kind is not Kind.MAPPING or part.flat or part.state is not None:
        return False
    if type(part.args) is not tuple or not all(type(a) is Sequence and not a.items for a in part.args):
        return False
    part.kind = Kind.HOOKS
    return True


def marks(part: object) -> bool:
    """Accept the conjugate and negative bits of a tensor."""
    if part is None:
        return True
    if type(part) is not Mapping or len(part.flat) > _MOST_MARKS:
        return False
    pairs = zip(part.flat[::2], part.flat[1::2], strict=False)
    return all(type(k) is str and k in ("conj", "neg") and type(v) is bool for k, v in pairs)


def pairs(part: object) -> bool:
    """Accept what a dict can be made of."""
    if type(part) is Mapping:
        return True
    if type(part) is Call:
        return part.kind is Kind.MAPPING
    items = part.items if type(part) is Sequence else part
    if not isinstance(items, list | tuple):
        return False
    return all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in map(_items, items))


def items(part: object) -> bool:
    """Accept what a list can be made of."""
    return type(part) in (Sequence, SetOf, tuple) or (type(part) is Call and part.kind in (Kind.LIST, Kind.SET))


def elements(part: object) -> bool:
    """Accept what a set can be made of."""
    items = part.items if type(part) in (Sequence, SetOf) else part  # type: ignore[attr-defined]
    return isinstance(items, list | tuple)


def is_device(part: object) -> bool:
    """True if it names a device, as torch writes it."""
    if type(part) is Call:
        return part.calls("torch.device")
    if type(part) is not str:
        return False
    word, colon, index = part.partition(":")
    return word in DEVICES and (not colon or (index.isdecimal() and str(int(index)) == index and len(index) < 4))


def layout_name(part: object) -> bool:
    """Accept the name of one of torch's layouts."""
    return type(part) is str and part.removeprefix("torch.") in LAYOUTS and part.startswith("torch.")


def layout(part: object) -> bool:
    """Accept one of torch's layouts."""
    return type(part) is Call and part.calls("torch.serialization._get_layout")


def sparse_parts(part: object) -> bool:
    """Accept indices and values, the whole shape, and optionally whether each index is unique."""
    if type(part) is not tuple or not 3 <= len(part) <= 4:
        return False
    own, whole = (part[:2], part[2]) if len(part) == 3 or not tensor(part[2]) else (part[:3], part[3])
    shapes = [shape_of(one) for one in own]
    if not all(map(_is_index, own[:-1])):
        return False  # torch would convert it
    marks = part[len(own) + 1 :]
    if None in shapes or not sizes(whole) or any(type(mark) not in (bool, type(None)) for mark in marks):
        return False
    if not is_countable(sizes_of(whole)):
        return False
    *_, indices, values = cast("list[tuple[int, ...]]", shapes)
    if len(own) == 2:
        dimensions = len(sizes_of(whole))
        return len(indices) == 2 and values[:1] == indices[1:] and indices[0] + len(values) - 1 == dimensions
    return len(cast("tuple[int, ...]", shapes[0])) == len(indices) > 0 and values[: len(indices)] == indices


def _is_index(part: object) -> bool:
    """True if a plain tensor has one of torch's integer types for indices."""
    stored = part.args[0] if type(part) is Call and type(part.args) is tuple and part.args else None
    parts = stored.value if type(stored) is PersistentId else None
    kind = parts[1] if type(parts) is tuple and len(parts) > 1 else None
    return type(kind) is Global and kind.name in ("LongStorage", "IntStorage")


def shape_of(part: object) -> tuple[int, ...] | None:
    """Return the shape of a plain tensor, or None."""
    if type(part) is not Call or part.kind is not Kind.TENSOR or type(part.args) is not tuple or not part.args:
        return None
    if part.calls("torch._utils._rebuild_parameter"):
        return shape_of(part.args[0])
    if len(part.args) < 4 or type(part.args[0]) is not PersistentId or not sizes(part.args[2]):
        return None
    return sizes_of(part.args[2])


def sizes_of(part: object) -> tuple[int, ...]:
    """Return the numbers of a value that `sizes` accepts."""
    stated = part.args[0] if type(part) is Call and type(part.args) is tuple and part.args else part
    numbers = stated.items if type(stated) is Sequence else stated
    return tuple(numbers) if isinstance(numbers, list | tuple) else ()


def quantiser(part: object) -> bool:
    """Accept scheme, scale and zero point; or scheme, scales, zero points and axis."""
    if type(part) is not tuple or not part or type(part[0]) is not Global or part[0].module != "torch":
        return False
    scheme, rest = part[0].name, part[1:]
    if scheme == "per_tensor_affine":
        return len(rest) == 2 and type(rest[0]) is float and type(rest[1]) is int
    parts = len(rest) == 3 and all(type(p) is Sequence or tensor(p) for p in rest[:2]) and type(rest[2]) is int
    return parts and scheme in ("per_channel_affine", "per_channel_affine_float_qparams")


def size_arguments(part: object) -> bool:
    """Accept what a torch.Size can be made of."""
    return (integers(part) or sizes(part)) and all(type(n) is int and -(2**63) <= n < 2**63 for n in sizes_of(part))


def codec(part: object) -> bool:
    """Accept the only encoding that keeps bytes as they are."""
    return type(part) is str and part in ("latin1", "latin-1")


def latin(part: object) -> bool:
    """Accept a text that represents bytes."""
    if type(part) is LongText:
        return part.is_latin
    try:
        return type(part) is str and (part.isascii() or bool(part.encode("latin-1")))
    except UnicodeEncodeError:
        return False


def array_class(part: object) -> bool:
    """Accept numpy's arrays, or a kind of them."""
    return type(part) is Global and part.module == "numpy" and part.name in ("ndarray", "matrix", "recarray", "memmap")


def nowhere(part: object) -> bool:
    """Accept the shape that numpy writes for an array whose elements follow."""
    return part == (0,)


def attributes(part: object) -> bool:
    """Accept what may be set on a tensor: not what it is made of, or what cannot be set."""
    if part is None:
        return True
    if type(part) is tuple:
        return len(part) == 2 and all(type(p) is not tuple and attributes(p) for p in part)
    if type(part) is Call and (part.args or part.items or part.kind not in (Kind.OBJECT, Kind.MAPPING)):
        return False
    keys = (part.flat or [])[::2] if isinstance(part, Call | Mapping) else [None]
    return all(type(k) is str and k not in _OF_TENSORS_ALONE and not k.startswith("__") for k in keys)


def bytes_like(part: object) -> bool:
    """Accept bytes, in any protocol's form."""
    return type(part) in (bytes, LongBytes) or (type(part) is Call and part.kind in (Kind.BYTES, Kind.FIXED))


def torch_dtype(part: object) -> bool:
    """Accept a name in torch."""
    return type(part) is Global and part.module == "torch"


def factory(part: object) -> bool:
    """Accept what makes the missing values of a defaultdict."""
    if type(part) is Global:
        return type(part.row) is Row or part.module.partition(".")[0] != "torch"
    return part is None or (type(part) is Call and part.kind is Kind.OBJECT)


def size_or_none(part: object) -> bool:
    """Accept a number of elements, or None."""
    return part is None or (type(part) is int and 0 <= part < 2**63)


def number(part: object) -> bool:
    """Accept what a float can be made of."""
    return type(part) is float or (type(part) is int and abs(part) < _TOO_GREAT)


def owner(part: object) -> bool:
    """Accept an object with attributes."""
    return type(part) is Global or (type(part) is Call and part.kind is Kind.OBJECT)


def attributes_alone(part: object) -> bool:
    """Accept the attributes of a plain object; with slots, two dicts of them."""
    if type(part) is tuple:
        return len(part) == 2 and all(one is None or type(one) is Mapping for one in part)
    return type(part) is Mapping


text, flag, integer, a_tuple = of_type(str, LongText), of_type(bool), of_type(int), of_type(tuple)
no: Part = lambda part: part is False  # noqa: E731
a_global, storage = of_type(Global), of_type(PersistentId)
tensor, array, dtype = call_of(Kind.TENSOR), call_of(Kind.ARRAY), call_of(Kind.DTYPE)

# No other value is possible for these.
SURE = (storage, integer, sizes, flag, a_tuple, tensor, pairs, size_arguments)
