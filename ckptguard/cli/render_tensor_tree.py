"""A checkpoint's tensors as a tree of their dotted names, one line each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ckptguard.cli.output import say
from ckptguard.cli.render import cell, size

if TYPE_CHECKING:
    from ckptguard.inspect.show import Shown

_WIDEST_NAME = 60
_DEEPEST = 20  # levels; longer names go on in one piece
TITLES = ("type", "shape", "bytes", "largest", "of fp16", "")


class Row(NamedTuple):
    """One line: a name with its place in the tree, then the cells after it."""

    depth: int
    name: str
    cells: tuple[str, ...]


class TensorLine(NamedTuple):
    """One tensor: the parts of its name, how large it is, and the cells of its line."""

    parts: tuple[str, ...]
    bytes: int
    cells: tuple[str, ...]


def print_tree(shown: Shown) -> None:
    """Every tensor under its role and the parts of its name; groups say how many tensors and bytes they hold."""
    from ckptguard.inspect.show import fp16_share, stored_bytes

    manifest = shown.manifest
    by_role: dict[str, list[TensorLine]] = {}
    many = sum(bool(f.tensors) for f in manifest.files) > 1
    for file in manifest.files:
        for tensor in file.tensors:
            stored, share = stored_bytes(tensor), fp16_share(tensor)
            cells = (
                cell(tensor.dtype),
                str(list(tensor.shape)),
                size(stored),
                "-" if tensor.largest is None else f"{tensor.largest:.4g}",
                "-" if share is None else f"{100 * share:.2g}%" if share <= 1 else "beyond",
                "not finite" if (file.path, tensor.name) in shown.nonfinite else "",
                *((cell(file.path.removeprefix(manifest.path + "/")),) if many else ()),
            )
            parts = tuple(cell(p) for p in tensor.name.split(".", _DEEPEST))
            by_role.setdefault(tensor.role, []).append(TensorLine(parts, stored or 0, cells))
    rows: list[Row] = []
    for role, leaves in by_role.items():
        leaves.sort(key=lambda leaf: [_natural(p) for p in leaf.parts])
        rows.append(Row(0, f"{role}: {_sum(leaves)}", ()))
        rows += _rows(leaves, 0, 1)
    _print(rows, (*TITLES, *(("file",) if many else ())))


def _rows(leaves: Sequence[TensorLine], level: int, depth: int) -> Iterator[Row]:
    """The lines of tensors whose names agree in their first `level` parts."""
    start = 0
    while start < len(leaves):
        stop = start + 1
        first = leaves[start].parts[level : level + 1]
        while stop < len(leaves) and leaves[stop].parts[level : level + 1] == first:
            stop += 1
        group = leaves[start:stop]
        start = stop
        if len(group) == 1 or not first:
            yield from (Row(depth, ".".join(leaf.parts[level:]) or ".", leaf.cells) for leaf in group)
            continue
        shared = level + 1  # parts that all of the group have in common stay on one line
        while all(len(leaf.parts) > shared + 1 and leaf.parts[shared] == group[0].parts[shared] for leaf in group):
            shared += 1
        yield Row(depth, f"{'.'.join(group[0].parts[level:shared])}: {_sum(group)}", ())
        yield from _rows(group, shared, depth + 1)


def _sum(leaves: Sequence[TensorLine]) -> str:
    return f"{len(leaves)} tensor{'s' * (len(leaves) > 1)}, {size(sum(leaf.bytes for leaf in leaves))}"


def _natural(part: str) -> tuple[tuple[int, str], ...]:
    """Layers in the order of their numbers: 2 before 10."""
    return tuple((int(p[:18]), "") if p.isascii() and p.isdigit() else (-1, p) for p in re.split(r"(\d+)", part))


def _print(rows: Sequence[Row], titles: Sequence[str]) -> None:
    lines = [("  " * row.depth + row.name, row.cells) for row in rows]
    names = max((min(len(name), _WIDEST_NAME) for name, cells in lines if cells), default=0)
    widths = [len(t) for t in titles]
    for _, cells in lines:
        widths = [max(w, len(c)) for w, c in zip(widths, cells or titles, strict=True)]
    printed = [_line("TENSOR", [t.upper() for t in titles], names, widths)] if any(c for _, c in lines) else []
    printed += [name if not cells else _line(name, cells, names, widths) for name, cells in lines]
    say("\n".join(printed))


def _line(name: str, cells: Sequence[str], names: int, widths: Sequence[int]) -> str:
    right = {2, 3, 4}  # numbers
    columns = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
    return "  ".join([name.ljust(names), *columns]).rstrip()
