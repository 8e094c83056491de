"""Tensors that are made of other tensors: sparse, nested, quantised, distributed, and subclasses that wrap some."""

from __future__ import annotations

from typing import NamedTuple

from ckptguard.formats.pickle.inert_values import Call, Global
from ckptguard.formats.torch.rebuild_calls import FROM_TYPE, PARAMETERS, is_tensor

_SPARSE = ("torch._utils._rebuild_sparse_tensor", "torch._utils._rebuild_sparse_csr_tensor")
_NESTED = "torch._utils._rebuild_nested_tensor"
_WRAPPER = "torch._utils._rebuild_wrapper_subclass"
_OF_DEVICES = (
    "torch._utils._rebuild_device_tensor_from_cpu_tensor",
    "torch._utils._rebuild_device_tensor_from_numpy",
    "torch._utils._rebuild_xla_tensor",
)
_BY_COLUMNS = (("torch.sparse_csc",), ("torch.sparse_bsc",))


class Composite(NamedTuple):
    """`parts` by their names within the tensor ("" for the tensor itself), and the `states` set on it."""

    parts: tuple[tuple[str, object], ...]
    states: tuple[object, ...]


def as_composite(call: Call) -> Composite | None:
    """What the tensor that this call would make consists of; None if it would make none, or a plain one."""
    func, args = call.func, call.args
    if type(func) is not Global or type(args) is not tuple or is_tensor(call):
        return None
    states: tuple[object, ...] = () if call.state is None else (call.state,)
    if func.dotted in FROM_TYPE and len(args) > 2:
        states += args[3:4]
        func, args = args[0], args[2]
        if type(func) is not Global or type(args) is not tuple:
            return None
        if func.dotted == _WRAPPER:  # it only makes the shell that the state goes into
            return Composite((), states)
        return Composite(_parts(func.dotted, args) or (("", args),), states)
    if func.dotted == PARAMETERS[1]:
        states += args[3:4]
    parts = _parts(func.dotted, args)
    return None if parts is None else Composite(parts, states)


def _parts(dotted: str, args: tuple[object, ...]) -> tuple[tuple[str, object], ...] | None:
    if not args:
        return None
    if dotted in PARAMETERS or dotted in _OF_DEVICES:
        return (("", args[0]),)
    if dotted == _NESTED and len(args) == 4:
        return tuple(zip(("values", "sizes", "strides", "offsets"), args, strict=True))
    if dotted in _SPARSE and len(args) == 2 and type(args[1]) is tuple:
        layout, data = args[0], args[1]
        if len(data) >= 3 and type(data[2]) is Call and is_tensor(data[2]):
            by_columns = type(layout) is Call and type(layout.args) is tuple and layout.args[:1] in _BY_COLUMNS
            names = ("ccol_indices", "row_indices") if by_columns else ("crow_indices", "col_indices")
            return tuple(zip((*names, "values"), data, strict=False))
        return tuple(zip(("indices", "values"), data, strict=False))
    return None
