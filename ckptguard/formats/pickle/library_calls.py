"""The calls of Python's own library, numpy's generators and torch's checkpoint index in checkpoints' pickles.

Nothing else of Python's own library is known to load; see `known_calls`.
"""

from __future__ import annotations

import re
from typing import Any

from ckptguard.formats.pickle import arguments as may_be
from ckptguard.formats.pickle.arguments import Row
from ckptguard.formats.pickle.inert_values import Call, Global, Kind, Mapping
from ckptguard.formats.pickle.long_values import LongText
from ckptguard.formats.pickle.numpy_values import raw_bytes

_NOT_BYTES = "it makes bytes from a text without an encoding"
_DECIMAL = re.compile(r"[+-]?\d{1,1000}(?:\.\d{1,1000})?(?:E[+-]?\d{1,6})?")
_FRACTION = re.compile(r"-?\d{1,1000}(?:/[1-9]\d{0,1000})?")
_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
_DAYS = 999_999_999


def _of_bytes(args: tuple[Any, ...]) -> str | None:
    if not args or (type(args[0]) in (str, LongText)) == (len(args) == 2) or (len(args) == 1 and args[0] == ""):
        return None
    return _NOT_BYTES


def _of_fraction(args: tuple[Any, ...]) -> str | None:
    return "it divides a text" if len(args) == 2 and type(args[0]) is str else None


def _of_range(args: tuple[Any, ...]) -> str | None:
    return "it makes a range without a step" if args[2:] == (0,) else None


def _of_class(args: tuple[Any, ...]) -> str | None:
    """Return the doubt about a plain object in the form of the first protocols, or None."""
    made, base, state = args
    row = made.row
    plain = base.name == "object" and state is None and (row is None or (type(row) is Row and row.made))
    own = row is None and not made.meant.startswith("builtins.")
    known = plain or (own and base.name in ("dict", "list", "set", "tuple", "str", "int", "float"))
    return (
        None
        if known and base.meant == f"builtins.{base.name}"
        else "it makes an object of something that may not be a class"
    )


def _bytes_of(length: int, at: int, least: int, below: int) -> may_be.Part:
    """Accept this many bytes, with a range for one of them."""

    def is_right(part: object) -> bool:
        raw = raw_bytes(part)
        return type(raw) is bytes and len(raw) == length and least <= raw[at] & 0x7F < below

    return is_right


def _zone(part: object) -> bool:
    if part is None:
        return True
    return type(part) is Call and (part.kind is Kind.OBJECT or part.calls("datetime.timezone", *_NAMED_ZONE))


def _offset(part: object) -> bool:
    """Accept less than a day."""
    if type(part) is not Call or not part.calls("datetime.timedelta") or type(part.args) is not tuple:
        return False
    days, seconds, *_ = (*part.args, 0, 0)
    return days == 0 or (days == -1 and seconds > 0)


def _days(part: object) -> bool:
    return type(part) is int and abs(part) < _DAYS


def _less_than(limit: int) -> may_be.Part:
    return lambda part: type(part) is int and 0 <= part < limit


def _matches(form: re.Pattern[str]) -> may_be.Part:
    return lambda part: type(part) is str and form.fullmatch(part) is not None


def _part_of_fraction(part: object) -> bool:
    """Accept the whole as a text, as older versions write it, or one of its two numbers."""
    return type(part) is int or _matches(_FRACTION)(part)


def _divisor(part: object) -> bool:
    return type(part) is int and part != 0


def _path(part: object) -> bool:
    return type(part) is str and "\0" not in part


def _unique(state: object) -> bool:
    """Accept the number of a UUID, as it is set."""
    if type(state) is not Mapping:
        return False
    keys, values = state.flat[::2], state.flat[1::2]
    return keys == ["int"] and type(values[0]) is int and 0 <= values[0] < 2**128


def _properties(state: object) -> bool:
    """Accept torch's index of how a tensor is kept."""
    kept = state[3] if type(state) is tuple and len(state) == 5 else None
    return type(kept) is Call and kept.calls(f"{_INDEX}._MEM_FORMAT_ENCODING")


def _generator(part: object) -> bool:
    if type(part) is Call:
        return part.calls(f"{_RANDOM}.__bit_generator_ctor")
    return part in _GENERATORS if type(part) is str else type(part) is Global and part.name in _GENERATORS


def _of_memory_file(state: object) -> bool:
    """Accept the bytes of a file in memory, its position, and its attributes."""
    if type(state) is not tuple or len(state) != 3 or type(state[1]) is not int:
        return False
    return raw_bytes(state[0]) is not None and 0 <= state[1] < 2**63 and (state[2] is None or type(state[2]) is Mapping)


_INDEX, _RANDOM = "torch.distributed.checkpoint.metadata", "numpy.random._pickle"
_NAMED_ZONE = ("zoneinfo.ZoneInfo._unpickle",)
_STATE = may_be.of_type(Mapping, tuple)
LIBRARY_CALLS: dict[str, Row] = {
    "builtins.bytes": Row(
        Kind.FIXED, (lambda part: may_be.bytes_like(part) or part == "", may_be.codec), further=_of_bytes
    ),
    "builtins.bytearray": Row(
        Kind.BYTES,
        (lambda part: may_be.bytes_like(part) or may_be.latin(part) or may_be.octets(part), may_be.codec),
        further=_of_bytes,
    ),
    "builtins.complex": Row(Kind.FIXED, (may_be.number, may_be.number), made=True),
    "builtins.float": Row(Kind.FIXED, (may_be.number,), made=True),
    "builtins.int": Row(Kind.FIXED, (may_be.integer,), made=True),
    "builtins.long": Row(Kind.FIXED, (may_be.integer,), made=True),
    "builtins.str": Row(Kind.FIXED, (may_be.text,), made=True),
    "builtins.slice": Row(Kind.FIXED, (None,) * 3, 3, made=True),
    **{
        f"builtins.{name}": Row(Kind.FIXED, (may_be.integer,) * 3, 1, made=True, further=_of_range)
        for name in ("range", "xrange")
    },
    "builtins.object": Row(Kind.FIXED, made=True),
    "builtins.getattr": Row(Kind.OBJECT, (may_be.owner, may_be.text), 2),
    "builtins.type": Row(Kind.FIXED, (may_be.of_type(type(None)),), 1),
    "copyreg._reconstructor": Row(Kind.OBJECT, (may_be.a_global, may_be.a_global, None), 3, further=_of_class),
    "argparse.Namespace": Row(Kind.RECORD, made=True),
    "types.SimpleNamespace": Row(Kind.RECORD, made=True),
    "_io.BytesIO": Row(Kind.OBJECT, made=True, state=_of_memory_file),
    "functools.partial": Row(Kind.OBJECT, (may_be.owner,), 1),
    "decimal.Decimal": Row(Kind.FIXED, (_matches(_DECIMAL),), 1, made=True),
    "fractions.Fraction": Row(Kind.FIXED, (_part_of_fraction, _divisor), 1, made=True, further=_of_fraction),
    "uuid.UUID": Row(Kind.OBJECT, least=1, made=True, state=_unique),
    **{
        f"{module}.{name}": Row(Kind.FIXED, (_path,) * 100, made=True)
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "PureWindowsPath")
    },
    "datetime.datetime": Row(Kind.FIXED, (_bytes_of(10, 2, 1, 13), _zone), 1, made=True),
    "datetime.date": Row(Kind.FIXED, (_bytes_of(4, 2, 1, 13),), 1, made=True),
    "datetime.time": Row(Kind.FIXED, (_bytes_of(6, 0, 0, 24), _zone), 1, made=True),
    "datetime.timedelta": Row(Kind.FIXED, (_days, _less_than(86_400), _less_than(10**6)), made=True),
    "datetime.timezone": Row(Kind.FIXED, (_offset, may_be.text), 1, made=True),
    _NAMED_ZONE[0]: Row(Kind.OBJECT, (may_be.text, may_be.of_type(bool, int)), 2),
    "numpy.random.bit_generator.__pyx_unpickle_SeedSequence": Row(
        Kind.OBJECT, (may_be.a_global, may_be.integer, None), 3, state=_STATE
    ),
    f"{_RANDOM}.__bit_generator_ctor": Row(Kind.OBJECT, (_generator,), 1, state=_STATE),
    f"{_RANDOM}.__generator_ctor": Row(Kind.OBJECT, (_generator, may_be.a_global), 1, state=_STATE),
    f"{_RANDOM}.__randomstate_ctor": Row(Kind.OBJECT, (_generator, may_be.a_global), 1, state=_STATE),
    **{f"{_INDEX}.{name}": Row(Kind.RECORD, least=1, made=True) for name in ("Metadata", "TensorStorageMetadata")},
    f"{_INDEX}.ChunkStorageMetadata": Row(Kind.RECORD, least=1, made=True),
    f"{_INDEX}.BytesStorageMetadata": Row(Kind.RECORD, made=True),
    f"{_INDEX}.StorageMeta": Row(Kind.RECORD, made=True),
    f"{_INDEX}.TensorProperties": Row(Kind.RECORD, made=True, state=_properties),
    f"{_INDEX}.MetadataIndex": Row(Kind.OBJECT, least=1, made=True, state=may_be.attributes_alone),
    f"{_INDEX}._MEM_FORMAT_ENCODING": Row(Kind.FIXED, (_less_than(3),), 1),
    "torch.distributed.checkpoint.filesystem._StorageInfo": Row(Kind.RECORD, least=1, made=True),
    **{
        f"torch.jit._pickle.{name}": Row(Kind.OBJECT, (None,), 1)
        for name in ("build_intlist", "build_doublelist", "build_boollist", "build_tensorlist")
    },
    "torch.jit._pickle.restore_type_tag": Row(Kind.OBJECT, (None, may_be.text), 2),
}
