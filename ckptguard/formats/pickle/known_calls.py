"""The calls in checkpoints' pickles, with their arguments and results: one table.

For the modules in the table, no known version of torch, numpy or Python writes anything else. Loading other calls may
fail, or give other numbers than the file shows: the pickle is in doubt.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import math
import sys
from typing import Any, cast

from ckptguard.formats.dtypes import DTYPES, STORAGE_DTYPES
from ckptguard.formats.pickle import arguments as may_be
from ckptguard.formats.pickle.arguments import Row
from ckptguard.formats.pickle.constants import PickleProblem
from ckptguard.formats.pickle.inert_values import PYTHON_2, Call, Global, Kind, Mapping, PersistentId, Sequence
from ckptguard.formats.pickle.library_calls import LIBRARY_CALLS
from ckptguard.formats.pickle.long_values import LongBytes, LongText
from ckptguard.formats.pickle.numpy_values import is_placeholder, is_type, is_type_state

_ATOMS = frozenset((str, bytes, LongBytes, LongText, int, float, bool, type(None), Global))


def what_comes(call: Call, *, new: bool = False) -> str | None:
    """Set the result of a call, and return the doubt about it, if any. `new`: by NEWOBJ.

    Raises PickleProblem if the call must fail.
    """
    func, args = call.func, call.args
    if type(func) is not Global:
        if type(func) is PersistentId and type(func.value) is tuple and func.value[:1] == ("module",):
            return None  # a module's class, as old files refer to it
        if type(func) is not Call or func.kind is not Kind.OBJECT:
            raise PickleProblem("the pickle calls what cannot be called")
        return None if func.calls("builtins.getattr") else "it calls the result of another call"
    row = func.row
    if type(row) is not Row:
        if func.module == "torch" and func.name in _TORCH_VALUES:
            raise PickleProblem(f"the pickle calls {func.dotted}, which cannot be called")
        if not _may_be_called(func, args, new=new):
            return f"it calls {func.dotted}, whose result is not known"
        return _of_text(func, args)
    call.kind = row.kind
    if new:
        if not row.made:
            raise PickleProblem(f"the pickle makes an object of {func.dotted}, which is not a class")
        if row.kind in (Kind.MAPPING, Kind.LIST, Kind.SET) or (args == () and not row.parts):
            return None  # only the class's `__new__` gets the arguments, and ignores them
    return None if args == () and not row.least else _arguments(func.dotted, row, args)


def _may_be_called(func: Global, args: object, *, new: bool) -> bool:
    """True if a call that the table lacks is allowed. From other libraries any call is.

    From torch they are the classes of unlisted modules, in the form for their objects and the members of enumerations.
    """
    library = func.module.partition(".")[0]
    if library != "torch" or func.module in _CALLED_BY_NAME:
        return library not in _LIBRARIES
    if not func.name.rpartition(".")[2].lstrip("_")[:1].isupper() or type(args) is not tuple:
        return False
    return new or (len(args) == 1 and type(args[0]) in (int, str))


def _arguments(dotted: str, row: Row, args: object) -> str | None:
    if type(args) is not tuple:
        return f"it calls {dotted} without a tuple of arguments"
    if len(args) < row.least:
        raise PickleProblem(f"the pickle calls {dotted} with {len(args)} of at least {row.least} arguments")
    if len(args) > len(row.parts):
        return f"it calls {dotted} with {len(args)} arguments, which has no known result"
    for part, is_right in zip(args[row.free :], row.parts[row.free :], strict=False):
        if is_right is not None and not is_right(part):
            if type(part) in _ATOMS and part and is_right in may_be.SURE:
                raise PickleProblem(f"the pickle calls {dotted} with an argument that it cannot take")
            return f"it calls {dotted} with arguments that are not known"
    return None if row.further is None else row.further(args)


def what_is_set(call: Call, state: object) -> str | None:
    """Return the doubt about a state that is set on this call's result, or None."""
    kind, args = call.kind, call.args
    row = call.func.row if type(call.func) is Global else None
    if type(row) is Row and row.state is not None:
        is_right = row.state(state)
    elif kind is Kind.OBJECT:
        return None
    elif kind is Kind.MAPPING:
        is_right = type(state) is Mapping and call.calls(*_WITH_ATTRIBUTES)
    elif kind is Kind.RECORD:
        is_right = may_be.attributes_alone(state)
    elif kind is Kind.ARRAY:
        is_right = type(state) is tuple and len(state) == 5 and state[0] == 1 and _is_array_state(*state)
    elif kind is Kind.DTYPE:
        is_right = is_type_state(args, state)
    else:  # as the first versions of torch wrote tensors and parameters
        parts: tuple[may_be.Part, ...] = _OLD_VIEW if args == () else (may_be.flag, may_be.flag, may_be.hooks)
        old = call.calls("torch.nn.parameter.Parameter") if args else kind is Kind.TENSOR
        is_right = old and type(state) is tuple and len(state) == len(parts)
        is_right = is_right and all(right(part) for right, part in zip(parts, state, strict=True))  # type: ignore[call-overload]
    return None if is_right else f"it sets the state of {kind.value} in a way that is not known"


def _of_scalar(args: tuple[Any, ...]) -> str | None:
    return None if len(args) < 2 or _fills((), *args) else _NOT_FILLED


def _of_buffer(args: tuple[Any, ...]) -> str | None:
    return None if _fills(args[2], args[1], args[0]) else _NOT_FILLED


def _of_inner(args: tuple[Any, ...]) -> str | None:
    """Return the doubt about the call that a tensor subclass wraps, or None."""
    inner: Global = args[0]
    if type(inner.row) is not Row or (inner.name == _WRAPPER and len(args[2]) == len(inner.row.parts)):
        return None
    return _arguments(inner.dotted, inner.row, args[2])


def _of_device(args: tuple[Any, ...]) -> str | None:
    place, *index = args
    if not index or (type(place) is str and ":" not in place and type(index[0]) is int and index[0] < _MOST_DEVICES):
        return None
    return "it names a device twice"


def _of_shell(args: tuple[Any, ...]) -> str:
    return "it makes a tensor of other tensors, but not of these"


def _of_conversion(args: tuple[Any, ...]) -> str | None:
    """Return the doubt about numbers that are converted to another type while loaded, or None."""
    data, dtype, _, gradient = args
    stated = _storage_kind(data)
    is_whole = dtype.name.startswith(("int", "uint", "bool"))
    if dtype.name in _WIDE or STORAGE_DTYPES.get(stated) == dtype.name or (is_whole and not gradient):
        return None
    return f"it converts numbers to {dtype.dotted}, and they may not stay finite"


def _storage_kind(tensor: object) -> str:
    """Return the class of the storage of a plain tensor, or ""."""
    first = tensor.args[0] if type(tensor) is Call and type(tensor.args) is tuple and tensor.args else None
    parts = first.value if type(first) is PersistentId else None
    return parts[1].name if type(parts) is tuple and len(parts) > 1 and type(parts[1]) is Global else ""


def _is_array_state(_: object, shape: object, dtype: object, fortran: object, data: object) -> bool:
    return type(fortran) is bool and type(shape) is tuple and _fills(shape, dtype, data)


def _fills(shape: object, dtype: object, data: object) -> bool:
    """True if the number of bytes, or objects, fits an array of this shape."""
    shape = tuple(shape.items) if type(shape) is Sequence else shape
    stated = dtype.args[0] if type(dtype) is Call and type(dtype.args) is tuple and dtype.args else None
    if not may_be.dtype(dtype) or type(stated) is not str or not may_be.integers(shape):
        return False
    kind = stated.lstrip("<>|=")
    count = math.prod(cast("tuple[int, ...]", shape)) if all(n >= 0 for n in cast("tuple[int, ...]", shape)) else -1
    if kind.startswith("O"):
        return shape == () or (type(data) is Sequence and len(data.items) == count)
    if type(data) is Call and type(data.args) is tuple:
        data = data.args[0] if data.args else b""
    size = int(kind[1:]) * (4 if kind[0] == "U" else 1) if kind[1:].isdecimal() and len(kind) < 10 else None
    return type(data) in (bytes, str, LongBytes, LongText) and (size is None or len(data) == size * count)  # type: ignore[arg-type]


def _of_text(func: Global, args: object) -> str | None:
    """Return the doubt about a text that could become a number that is not finite, or None."""
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
    """Return the doubt about a name in a pickle, or None."""
    if module in PYTHON_2 and protocol >= 3:
        return f"it names {module}.{name}, which is known to Python 2 only"
    known = _names_of(module)
    if known is None or name in known:
        return None
    return f"it names {module}.{name}, which is not known to exist"


@functools.cache
def _names_of(module: str) -> frozenset[str] | None:
    """Return the names of a module that the table knows, or None. Those of Python's own modules are asked of Python:
    the modules are the table's, never a file's."""
    known = _NAMES.get(module)
    if known is not None or module not in _TABLED:
        return known
    if module in sys.stdlib_module_names:
        return frozenset(dir(importlib.import_module(module)))
    if module.startswith(("torch.", "numpy.")):
        own = (row.rpartition(".") for row in _ROWS)
        return frozenset(name for place, _, name in own if place == module) | _FURTHER.get(module, frozenset())
    return None


def row_of(module: str, name: str) -> Row | None:
    """Return the row for a name, or None."""
    return _ROWS.get(f"{PYTHON_2.get(module, module)}.{name}")


def _inner(part: object) -> bool:
    """Accept a function that makes tensors, or a library's own, inside a tensor subclass."""
    if type(part) is not Global:
        return False
    return part.row.kind is Kind.TENSOR if type(part.row) is Row else part.module not in _CALLED_BY_NAME


_SCHEMES = ("tensor_affine", "tensor_symmetric", "channel_affine", "channel_symmetric", "channel_affine_float_qparams")
_FORMATS = ("contiguous_format", "channels_last", "channels_last_3d", "preserve_format", "legacy_contiguous_format")
_ALIASES = ("double", "half", "float", "long", "short", "int", "cfloat", "cdouble", "chalf", "bit")
_NUMBERS = ("Double", "Float", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool")
_TORCH_VALUES = frozenset((*DTYPES, *may_be.LAYOUTS, *(f"per_{s}" for s in _SCHEMES), *_FORMATS, *_ALIASES))
_STORAGES = frozenset((*STORAGE_DTYPES, "TypedStorage"))
_WIDE = ("float32", "float64", "bfloat16", "complex64", "complex128")  # all usual numbers fit into these
_TENSOR_CLASSES = frozenset(f"{kind}Tensor" for kind in ("", *_NUMBERS))
_NO_PLAIN, _NO_BOOL = ("Tensor",), ("BoolTensor",)  # where torch has no such class
_TORCH_CLASSES = ("Size", "device", "dtype", "layout", "memory_format", "qscheme", "Generator", "finfo", "iinfo")
_MULTIARRAY = ("numpy.core.multiarray", "numpy._core.multiarray")
_NUMERIC = ("numpy.core.numeric", "numpy._core.numeric")

_WRAPPER = "_rebuild_wrapper_subclass"
_NOT_FILLED = "a number or array of numpy does not have the bytes that it needs"
_FROM_TYPE = ("torch._tensor._rebuild_from_type_v2", "torch._tensor._rebuild_from_type")
_OLD_VIEW = (may_be.storage, may_be.integer, may_be.sizes, may_be.sizes)
_VIEW = (None,) * 4  # these are compared with the storage when the tensor is placed
_FLAG_AND_HOOKS = (may_be.flag, may_be.hooks)
PLAIN_TENSOR = Row(Kind.TENSOR, (*_VIEW, *_FLAG_AND_HOOKS, may_be.marks), 6, free=4)  # none of its arguments is long
_UNDER_TORCH: dict[str, Row] = {
    "torch._utils._rebuild_tensor": Row(Kind.TENSOR, _VIEW, 4),
    "torch._utils._rebuild_tensor_v2": PLAIN_TENSOR,
    # With a gradient it cannot be made: torch sets the elements of what is a leaf already.
    "torch._utils._rebuild_tensor_v3": Row(
        Kind.TENSOR, (*_VIEW, may_be.no, may_be.hooks, may_be.torch_dtype, may_be.marks), 7
    ),
    "torch._utils._rebuild_qtensor": Row(Kind.TENSOR, (*_VIEW, may_be.quantiser, *_FLAG_AND_HOOKS), 7),
    "torch._utils._rebuild_parameter": Row(Kind.TENSOR, (may_be.tensor, *_FLAG_AND_HOOKS), 3),
    "torch._utils._rebuild_parameter_with_state": Row(
        Kind.TENSOR, (may_be.tensor, *_FLAG_AND_HOOKS, may_be.attributes), 4
    ),
    "torch._utils._rebuild_meta_tensor_no_storage": Row(
        Kind.TENSOR, (may_be.torch_dtype, may_be.sizes, may_be.sizes, may_be.flag), 4
    ),
    "torch._utils._rebuild_sparse_tensor": Row(Kind.TENSOR, (may_be.layout, may_be.sparse_parts), 2),
    "torch._utils._rebuild_nested_tensor": Row(Kind.TENSOR, (may_be.tensor,) * 4, 4),
    "torch._utils._rebuild_wrapper_subclass": Row(
        Kind.TENSOR,
        (may_be.a_global, *(None,) * 7),
        8,
        further=_of_shell,
    ),
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": Row(
        Kind.TENSOR, (may_be.tensor, may_be.torch_dtype, may_be.is_device, may_be.flag), 4, further=_of_conversion
    ),
    **{
        f"torch._utils.{name}": Row(
            Kind.TENSOR, (may_be.array, may_be.torch_dtype, may_be.is_device, may_be.flag), 4, further=_of_conversion
        )
        for name in ("_rebuild_device_tensor_from_numpy", "_rebuild_xla_tensor")
    },
    **{
        name: Row(Kind.TENSOR, (_inner, may_be.a_global, may_be.a_tuple, may_be.attributes), 4, further=_of_inner)
        for name in _FROM_TYPE
    },
    **{
        f"torch.{where}{name}": Row(Kind.TENSOR, made=True)
        for where, missing in (
            ("", ()),
            ("cuda.", _NO_PLAIN),
            ("sparse.", _NO_BOOL),
            ("cuda.sparse.", _NO_PLAIN + _NO_BOOL),
        )
        for name in _TENSOR_CLASSES - {*missing}
    },
    "torch.nn.parameter.Parameter": Row(Kind.TENSOR, (may_be.tensor, may_be.flag), made=True),
    "torch.nn.parameter.UninitializedParameter": Row(Kind.OBJECT, (may_be.flag,), made=True),
    "torch.nn.parameter.UninitializedBuffer": Row(Kind.OBJECT, (may_be.flag,), made=True),
    "torch.storage._load_from_bytes": Row(Kind.OBJECT, (may_be.bytes_like,), 1),
    "torch.serialization._get_layout": Row(Kind.FIXED, (may_be.layout_name,), 1),
    "torch.Size": Row(Kind.FIXED, (may_be.size_arguments,), made=True),
    "torch.device": Row(Kind.FIXED, (may_be.is_device, may_be.size_or_none), 1, made=True, further=_of_device),
    "torch.Generator": Row(Kind.OBJECT, (may_be.is_device,), made=True),
}
_ROWS: dict[str, Row] = {
    **_UNDER_TORCH,
    **LIBRARY_CALLS,
    "collections.OrderedDict": Row(Kind.MAPPING, (may_be.pairs,), made=True),
    "collections.Counter": Row(Kind.MAPPING, (may_be.pairs,), made=True),
    "collections.defaultdict": Row(Kind.MAPPING, (may_be.factory, may_be.pairs), made=True),
    "collections.deque": Row(Kind.LIST, (may_be.items, may_be.size_or_none), made=True),
    "builtins.dict": Row(Kind.MAPPING, (may_be.pairs,), made=True),
    "builtins.list": Row(Kind.LIST, (may_be.items,), made=True),
    "builtins.set": Row(Kind.SET, (may_be.elements,), made=True),
    "builtins.frozenset": Row(Kind.FIXED, (may_be.elements,), made=True),
    "builtins.tuple": Row(Kind.FIXED, (may_be.items,), made=True),
    "_codecs.encode": Row(Kind.FIXED, (may_be.latin, may_be.codec), 2),
    "numpy.dtype": Row(Kind.DTYPE, (is_type, may_be.of_type(bool, int), may_be.of_type(bool, int)), 1),
    **{f"{m}.scalar": Row(Kind.FIXED, (may_be.dtype, None), 1, further=_of_scalar) for m in _MULTIARRAY},
    **{
        f"{m}._reconstruct": Row(Kind.ARRAY, (may_be.array_class, may_be.nowhere, is_placeholder), 3)
        for m in _MULTIARRAY
    },
    **{
        f"{m}._frombuffer": Row(
            Kind.ARRAY, (may_be.bytes_like, may_be.dtype, may_be.integers, may_be.text), 4, further=_of_buffer
        )
        for m in _NUMERIC
    },
}
_SCALARS = (
    "bool_ byte ubyte short ushort intc uintc int_ uint long ulong longlong ulonglong intp uintp half single double"
    " longdouble csingle cdouble clongdouble str_ bytes_ void object_ generic number integer signedinteger inexact"
    " unsignedinteger floating complexfloating flexible character"
    " datetime64 timedelta64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 float128"
    " complex64 complex128 complex256"
)
_MOST_DEVICES = 100
_WITH_ATTRIBUTES = ("collections.OrderedDict", "collections.Counter")
_LIBRARIES = sys.stdlib_module_names | {*PYTHON_2, "numpy", "torch"}
# From these modules a file calls only what is in the table, or nothing known.
_CALLED_BY_NAME = frozenset(
    ("torch", "torch._utils", "torch._tensor", "torch.storage", "torch.serialization", "numpy", *_MULTIARRAY, *_NUMERIC)
) | {"torch.nn.parameter", *(name.rpartition(".")[0] for name in LIBRARY_CALLS)}
_TABLED = frozenset(name.rpartition(".")[0] for name in _ROWS)
# Names that exist besides those that are called.
_FURTHER = {
    "torch.nn.parameter": frozenset(("Buffer", "UninitializedTensorMixin")),
    "torch.cuda": frozenset(f"{kind}Storage" for kind in (*_NUMBERS, "ComplexFloat", "ComplexDouble")),
    "torch.distributed.checkpoint.filesystem": frozenset(("_StoragePrefix", "SerializationFormat")),
    "torch.distributed.checkpoint.metadata": frozenset(("STATE_DICT_TYPE",)),
    "numpy.random.bit_generator": frozenset(("BitGenerator", "SeedSequence", "SeedlessSeedSequence")),
}
_NAMES: dict[str, frozenset[str]] = {
    "torch": frozenset((*_TORCH_VALUES, *_STORAGES, *_TENSOR_CLASSES, *_TORCH_CLASSES)),
    "torch._utils": frozenset(name.rpartition(".")[2] for name in _UNDER_TORCH if name.startswith("torch._utils.")),
    "torch._tensor": frozenset(("_rebuild_from_type_v2", "_rebuild_from_type", "Tensor")),
    "torch.storage": frozenset(("TypedStorage", "UntypedStorage", "_load_from_bytes")),
    "torch.serialization": frozenset(("_get_layout",)),
    "collections": frozenset(("OrderedDict", "Counter", "defaultdict", "deque", "UserDict", "UserList", "UserString")),
    "builtins": frozenset(dir(builtins)),
    "__builtin__": frozenset(dir(builtins)) | {"long", "unicode", "basestring", "xrange"},
    "numpy": frozenset(("ndarray", "dtype", "matrix", "recarray", "record", "bool", *_SCALARS.split())),
    **{module: frozenset(("_reconstruct", "scalar")) for module in _MULTIARRAY},
    **{module: frozenset(("_frombuffer",)) for module in _NUMERIC},
    "_codecs": frozenset(("encode", "decode")),
}
