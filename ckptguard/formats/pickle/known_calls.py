"""What the pickles of checkpoints name and call, with which arguments, and what comes of it: one table.

What is not in it, of modules that it lists, was written by no version of torch, numpy or Python that we know. Loading
that may fail, or yield other numbers than those that the file shows: the pickle is in doubt.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple, cast

from ckptguard.formats.dtypes import DTYPES, STORAGE_DTYPES
from ckptguard.formats.pickle.constants import PickleProblem
from ckptguard.formats.pickle.inert_values import Call, Global, Kind, Mapping, PersistentId, Sequence, SetOf

Part = Callable[[object], bool]


class Row(NamedTuple):
    """What comes of a call, which arguments it takes, and how many of them it needs. `made`: by a class, which NEWOBJ
    may name too. `doubt`: why nobody can tell what comes of it."""

    kind: Kind
    parts: tuple[Part, ...] = ()
    least: int = 0
    made: bool = False
    doubt: str = ""


_ATOMS = frozenset((str, bytes, int, float, bool, type(None), Global))
_MOST_PARTS = 10_000  # of a key
_MAX_DIMENSIONS = 64


def what_comes(call: Call, *, new: bool) -> str | None:
    """Set what comes of a call; the doubt about it, if there is one. `new`: by NEWOBJ. PickleProblem where it cannot
    but fail."""
    func, args = call.func, call.args
    if type(func) is not Global:
        if type(func) is not Call or func.kind is not Kind.OBJECT:
            raise PickleProblem("the pickle calls what cannot be called")
        return None
    row = func.row
    if type(row) is not Row:
        if func.module == "torch" and func.name in _TORCH_VALUES:
            raise PickleProblem(f"the pickle calls {func.dotted}, which cannot be called")
        if func.module in _CALLED_BY_NAME:
            return f"it calls {func.dotted}: what comes of that is not known"
        return _of_text(func, args)
    call.kind = row.kind
    if row.doubt:
        return row.doubt
    if new:
        if not row.made:
            raise PickleProblem(f"the pickle makes an object of {func.dotted}, which is no class")
        if row.kind is not Kind.TENSOR:
            return None  # only the class's `__new__` sees the arguments, and ignores them
    doubt = _arguments(func.dotted, row, args)
    if doubt is None and func.dotted in _FROM_TYPE:
        inner, _, inner_args, _ = cast("tuple[Global, object, tuple[object, ...], object]", args)
        return None if inner.row is None else _arguments(inner.dotted, cast("Row", inner.row), inner_args)
    return doubt


def _arguments(dotted: str, row: Row, args: object) -> str | None:
    if type(args) is not tuple:
        return f"it calls {dotted} without a tuple of arguments"
    if len(args) < row.least:
        raise PickleProblem(f"the pickle calls {dotted} with {len(args)} of at least {row.least} arguments")
    if len(args) > len(row.parts):
        return f"it calls {dotted} with {len(args)} arguments: what comes of that is not known"
    for part, is_right in zip(args, row.parts, strict=False):
        if not is_right(part):
            if type(part) in _ATOMS and part and is_right in _SURE:
                raise PickleProblem(f"the pickle calls {dotted} with what it cannot take")
            return f"it calls {dotted} with arguments that are not known"
    return None


def what_is_set(call: Call, state: object) -> str | None:
    """The doubt about a state that is set on what this call makes."""
    kind, args = call.kind, call.args
    if kind is Kind.OBJECT or state is None:
        return None
    if kind in (Kind.MAPPING, Kind.LIST, Kind.SET):
        is_right = type(state) is Mapping or (type(state) is tuple and len(state) == 2)
    elif kind in (Kind.ARRAY, Kind.DTYPE):
        is_right = type(state) is tuple
    else:  # as the first versions of torch wrote tensors and parameters
        parts: tuple[Part, ...] = _VIEW if args == () else (_flag, _flag, _hooks)
        old = call.calls("torch.nn.parameter.Parameter") if args else kind is Kind.TENSOR
        is_right = old and type(state) is tuple and len(state) == len(parts)
        is_right = is_right and all(right(part) for right, part in zip(parts, state, strict=True))  # type: ignore[call-overload]
    return None if is_right else f"it sets the state of {kind.value} in a way that is not known"


def _of_text(func: Global, args: object) -> str | None:
    """Whether a number that is not finite could come of a text."""
    for part in args if type(args) is tuple else ():
        if type(part) is str and len(part) < 100:
            try:
                number = float(part)
            except ValueError:
                continue
            if not math.isfinite(number):
                return f"it calls {func.dotted} with a text that may become {number}"
    return None


def doubtful_name(module: str, name: str, protocol: int) -> str | None:
    """The doubt about what a pickle names, if there is one."""
    if module in _PYTHON_2 and protocol >= 3:
        return f"it names {module}.{name}, which is known to Python 2 only"
    known = _NAMES.get(_PYTHON_2.get(module, module))
    if known is None or name.partition(".")[0] in known:
        return None
    return f"it names {module}.{name}, which is not known to exist"


def row_of(module: str, name: str) -> Row | None:
    """The row of what is named so."""
    return _ROWS.get(f"{_PYTHON_2.get(module, module)}.{name}")


def check_keys(keys: Iterable[object]) -> None:
    """PickleProblem if one of them can be no key of a dict, and no element of a set."""
    for key in keys:
        if type(key) is not str and not is_hashable(key):
            raise PickleProblem("a key of a dict, or an element of a set, is of a kind that can be none")


def is_hashable(key: object) -> bool:
    """Whether it can be a key. A nest of tuples that takes for ever to hash cannot."""
    waiting, room = [key], _MOST_PARTS
    while waiting:
        value = waiting.pop()
        room -= 1
        if type(value) is tuple:
            waiting += value
        elif type(value) is Call:
            if value.kind in _UNHASHABLE:
                return False
        elif type(value) is Sequence or type(value) is Mapping or (type(value) is SetOf and not value.frozen):
            return False
        if room < len(waiting):
            return False
    return True


# -- what an argument may be


def _anything(part: object) -> bool:
    return True


def _is(*kinds: type) -> Part:
    return lambda part: type(part) in kinds


def _call_of(*kinds: Kind) -> Part:
    return lambda part: type(part) is Call and part.kind in kinds


def _sizes(part: object) -> bool:
    if type(part) is Call:
        return part.calls("torch.Size")
    return type(part) is tuple and len(part) <= _MAX_DIMENSIONS and all(type(n) is int for n in part)


def _integers(part: object) -> bool:
    items = part.items if type(part) is Sequence else part
    return isinstance(items, list | tuple) and all(type(n) is int for n in items)


def _hooks(part: object) -> bool:
    """None, or an OrderedDict that nothing was put into, nor will be."""
    if part is None:
        return True
    if type(part) is not Call or not part.calls("collections.OrderedDict"):
        return False
    nothing = part.args == () or (
        type(part.args) is tuple and all(type(a) is Sequence and not a.items for a in part.args)
    )
    if not nothing or part.flat or part.state is not None:
        return False
    part.kind = Kind.HOOKS
    return True


def _marks(part: object) -> bool:
    """The conjugate and negative bits of a tensor."""
    if part is None:
        return True
    if type(part) is not Mapping:
        return False
    pairs = zip(part.flat[::2], part.flat[1::2], strict=False)
    return all(type(k) is str and k in ("conj", "neg") and type(v) is bool for k, v in pairs)


def _pairs(part: object) -> bool:
    if type(part) is Mapping:
        return True
    if type(part) is Call:
        return part.kind is Kind.MAPPING
    items = part.items if type(part) is Sequence else part
    if not isinstance(items, list | tuple):
        return False
    pairs = [pair.items if type(pair) is Sequence else pair for pair in items]
    return all(isinstance(p, list | tuple) and len(p) == 2 and is_hashable(p[0]) for p in pairs)


def _items(part: object) -> bool:
    return type(part) in (Sequence, SetOf, tuple) or (type(part) is Call and part.kind in (Kind.LIST, Kind.SET))


def _elements(part: object) -> bool:
    items = part.items if type(part) in (Sequence, SetOf) else part  # type: ignore[attr-defined]
    return isinstance(items, list | tuple) and all(map(is_hashable, items))


def is_device(part: object) -> bool:
    """Whether it names a device, as torch writes it."""
    if type(part) is Call:
        return part.calls("torch.device")
    if type(part) is not str:
        return False
    word, colon, index = part.partition(":")
    return word in DEVICES and (not colon or (index.isdecimal() and len(index) < 4))


def _layout(part: object) -> bool:
    return type(part) is str and part.removeprefix("torch.") in _LAYOUTS and part.startswith("torch.")


def _quantiser(part: object) -> bool:
    if type(part) is not tuple or not part or type(part[0]) is not Global or part[0].module != "torch":
        return False
    scheme, rest = part[0].name, part[1:]
    if scheme == "per_tensor_affine":
        return len(rest) == 2 and type(rest[0]) is float and type(rest[1]) is int
    parts = len(rest) == 3 and all(type(p) is Sequence or _tensor(p) for p in rest[:2]) and type(rest[2]) is int
    return parts and scheme in ("per_channel_affine", "per_channel_affine_float_qparams")


def _size_arguments(part: object) -> bool:
    return _integers(part) or _sizes(part)


def _codec(part: object) -> bool:
    return type(part) is str and part in ("latin1", "latin-1")


def _latin(part: object) -> bool:
    return type(part) is str and (part.isascii() or max(part) <= "\xff")


def _nowhere(part: object) -> bool:
    """The shape that numpy writes for an array whose elements follow."""
    return part == (0,)


def _bytes_like(part: object) -> bool:
    return type(part) is bytes or (type(part) is Call and part.kind in (Kind.BYTES, Kind.FIXED))


def _torch_dtype(part: object) -> bool:
    return type(part) is Global and part.module == "torch"


def _factory(part: object) -> bool:
    return part is None or type(part) is Global or (type(part) is Call and part.kind is Kind.OBJECT)


_text, _flag, _integer, _tuple = _is(str), _is(bool), _is(int), _is(tuple)
_number, _global, _storage = _is(int, float), _is(Global), _is(PersistentId)
_tensor, _array, _dtype = _call_of(Kind.TENSOR), _call_of(Kind.ARRAY), _call_of(Kind.DTYPE)

# Nothing else will do where these are wanted.
_SURE = (_storage, _integer, _sizes, _flag, _tuple, _tensor, _pairs, _size_arguments)


def _inner(part: object) -> bool:
    """What a tensor subclass is made by: a function that makes tensors, or one of a library's own."""
    if type(part) is not Global:
        return False
    return part.row.kind is Kind.TENSOR if type(part.row) is Row else part.module not in _CALLED_BY_NAME


_DEVICES = (
    "cpu cuda ipu xpu mkldnn opengl opencl ideep hip ve fpga maia xla lazy vulkan mps meta hpu mtia privateuseone"
    " npu mlu musa"
)
DEVICES = frozenset(_DEVICES.split())
_SPARSE = ("sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc")
_LAYOUTS = frozenset(("strided", *_SPARSE, "_mkldnn", "jagged"))
_SCHEMES = ("tensor_affine", "tensor_symmetric", "channel_affine", "channel_symmetric", "channel_affine_float_qparams")
_FORMATS = ("contiguous_format", "channels_last", "channels_last_3d", "preserve_format", "legacy_contiguous_format")
_ALIASES = ("double", "half", "float", "long", "short", "int", "cfloat", "cdouble", "chalf", "bit")
_NUMBERS = ("Double", "Float", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool")
_TORCH_VALUES = frozenset((*DTYPES, *_LAYOUTS, *(f"per_{s}" for s in _SCHEMES), *_FORMATS, *_ALIASES))
_STORAGES = frozenset((*STORAGE_DTYPES, "TypedStorage", "_TypedStorage", "_UntypedStorage"))
_TENSOR_CLASSES = frozenset(f"{kind}Tensor" for kind in ("", *_NUMBERS))
_TORCH_CLASSES = ("Size", "device", "dtype", "layout", "memory_format", "qscheme", "Generator", "finfo", "iinfo")
_UNHASHABLE = (Kind.MAPPING, Kind.LIST, Kind.SET, Kind.ARRAY, Kind.BYTES, Kind.HOOKS)
_PYTHON_2 = {"__builtin__": "builtins", "copy_reg": "copyreg"}
_MULTIARRAY = ("numpy.core.multiarray", "numpy._core.multiarray")
_NUMERIC = ("numpy.core.numeric", "numpy._core.numeric")

_FROM_TYPE = ("torch._tensor._rebuild_from_type_v2", "torch._tensor._rebuild_from_type")
_VIEW = (_storage, _integer, _sizes, _sizes)
_FLAG_AND_HOOKS = (_flag, _hooks)
_UNDER_TORCH: dict[str, Row] = {
    "torch._utils._rebuild_tensor": Row(Kind.TENSOR, _VIEW, 4),
    "torch._utils._rebuild_tensor_v2": Row(Kind.TENSOR, (*_VIEW, *_FLAG_AND_HOOKS, _marks), 6),
    "torch._utils._rebuild_tensor_v3": Row(Kind.TENSOR, (*_VIEW, *_FLAG_AND_HOOKS, _torch_dtype, _marks), 7),
    "torch._utils._rebuild_qtensor": Row(Kind.TENSOR, (*_VIEW, _quantiser, *_FLAG_AND_HOOKS), 7),
    "torch._utils._rebuild_parameter": Row(Kind.TENSOR, (_tensor, *_FLAG_AND_HOOKS), 3),
    "torch._utils._rebuild_parameter_with_state": Row(Kind.TENSOR, (_tensor, *_FLAG_AND_HOOKS, _anything), 4),
    "torch._utils._rebuild_meta_tensor_no_storage": Row(Kind.TENSOR, (_torch_dtype, _sizes, _sizes, _flag), 4),
    "torch._utils._rebuild_sparse_tensor": Row(Kind.TENSOR, (_call_of(Kind.FIXED), _tuple), 2),
    "torch._utils._rebuild_sparse_csr_tensor": Row(Kind.TENSOR, (_call_of(Kind.FIXED), _tuple), 2),
    "torch._utils._rebuild_nested_tensor": Row(Kind.TENSOR, (_tensor,) * 4, 4),
    "torch._utils._rebuild_wrapper_subclass": Row(
        Kind.TENSOR, (_global, *(_anything,) * 7), 8, doubt="it makes a tensor of other tensors, but not those"
    ),
    "torch._utils._rebuildis_device_tensor_from_cpu_tensor": Row(
        Kind.TENSOR, (_tensor, _torch_dtype, is_device, _flag), 4
    ),
    **{
        f"torch._utils.{name}": Row(Kind.TENSOR, (_array, _torch_dtype, is_device, _flag), 4)
        for name in ("_rebuildis_device_tensor_from_numpy", "_rebuild_xla_tensor")
    },
    **{name: Row(Kind.TENSOR, (_inner, _global, _tuple, _anything), 4) for name in _FROM_TYPE},
    **{
        f"torch.{where}{name}": Row(Kind.TENSOR, made=True)
        for where in ("", "cuda.", "sparse.", "cuda.sparse.")
        for name in _TENSOR_CLASSES
    },
    "torch.nn.parameter.Parameter": Row(Kind.TENSOR, (_tensor, _flag), made=True),
    "torch.nn.parameter.UninitializedParameter": Row(Kind.OBJECT, (_anything,) * 3, made=True),
    "torch.nn.parameter.UninitializedBuffer": Row(Kind.OBJECT, (_anything,) * 3, made=True),
    "torch.storage._load_from_bytes": Row(Kind.OBJECT, (_bytes_like,), 1),
    "torch.serialization._get_layout": Row(Kind.FIXED, (_layout,), 1),
    "torch.Size": Row(Kind.FIXED, (_size_arguments,), made=True),
    "torch.device": Row(Kind.FIXED, (is_device, _integer), 1, made=True),
    "torch.Generator": Row(Kind.OBJECT, (_anything,), made=True),
}
_ROWS: dict[str, Row] = {
    **_UNDER_TORCH,
    "collections.OrderedDict": Row(Kind.MAPPING, (_pairs,), made=True),
    "collections.Counter": Row(Kind.MAPPING, (_pairs,), made=True),
    "collections.defaultdict": Row(Kind.MAPPING, (_factory, _pairs), made=True),
    "collections.deque": Row(Kind.LIST, (_items, _is(int, type(None))), made=True),
    "builtins.dict": Row(Kind.MAPPING, (_pairs,), made=True),
    "builtins.list": Row(Kind.LIST, (_items,), made=True),
    "builtins.set": Row(Kind.SET, (_elements,), made=True),
    "builtins.frozenset": Row(Kind.FIXED, (_elements,), made=True),
    "builtins.tuple": Row(Kind.FIXED, (_items,), made=True),
    "builtins.bytes": Row(Kind.FIXED, (lambda part: _bytes_like(part) or part == "", _codec)),
    "builtins.bytearray": Row(Kind.BYTES, (lambda part: _bytes_like(part) or _latin(part) or _integers(part), _codec)),
    "builtins.complex": Row(Kind.FIXED, (_number, _number)),
    "builtins.float": Row(Kind.FIXED, (_number,)),
    "builtins.int": Row(Kind.FIXED, (_integer,)),
    "builtins.long": Row(Kind.FIXED, (_integer,)),
    "_codecs.encode": Row(Kind.FIXED, (_latin, _codec), 1),
    "numpy.dtype": Row(Kind.DTYPE, (_text, _is(bool, int), _is(bool, int)), 1),
    **{f"{m}.scalar": Row(Kind.FIXED, (_dtype, _anything), 1) for m in _MULTIARRAY},
    **{f"{m}._reconstruct": Row(Kind.ARRAY, (_global, _nowhere, _bytes_like), 3) for m in _MULTIARRAY},
    **{f"{m}._frombuffer": Row(Kind.ARRAY, (_bytes_like, _dtype, _integers, _text), 4) for m in _NUMERIC},
}
# Of these modules a file calls what is in the table, or nothing that we would know.
_CALLED_BY_NAME = frozenset(
    ("torch", "torch._utils", "torch._tensor", "torch.storage", "torch.serialization", "numpy", *_MULTIARRAY, *_NUMERIC)
) | {"_codecs", "torch.nn.parameter"}
_NAMES: dict[str, frozenset[str]] = {
    "torch": frozenset((*_TORCH_VALUES, *_STORAGES, *_TENSOR_CLASSES, *_TORCH_CLASSES)),
    "torch._utils": frozenset(name.rpartition(".")[2] for name in _UNDER_TORCH if name.startswith("torch._utils.")),
    "torch._tensor": frozenset(("_rebuild_from_type_v2", "_rebuild_from_type", "Tensor")),
    "torch.storage": frozenset((*_STORAGES, "_load_from_bytes")),
    "torch.serialization": frozenset(("_get_layout",)),
    "collections": frozenset(("OrderedDict", "Counter", "defaultdict", "deque", "UserDict", "UserList", "UserString")),
    "builtins": frozenset(dir(builtins)) | {"long", "unicode", "basestring", "xrange"},
    "_codecs": frozenset(("encode", "decode")),
}
