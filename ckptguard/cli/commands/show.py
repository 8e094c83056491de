"""``ckptguard show``: one checkpoint, file by file, with its verdicts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import click

from ckptguard.cli.command import PathOrUrl, Shared, command
from ckptguard.cli.render import cell, facts, print_findings, size, table
from ckptguard.terminal.output import bytes_below, emit, say, warn, working
from ckptguard.values.exit_codes import ExitCode

if TYPE_CHECKING:
    from ckptguard.inspect.show import Shown

_DEEPEST = 20  # levels; longer names go on in one piece


@command("show", "Describe one checkpoint.", (ExitCode.BAD, ExitCode.NOT_FOUND))
@click.argument("ckpt", type=PathOrUrl())
@click.option("--tensors", is_flag=True, help="List every tensor.")
def show(ckpt: str, tensors: bool, shared: Shared) -> None:
    """Describe CKPT: its files, digests and tensors, and every verdict on it. Nothing is compared with its digests:
    `ckptguard verify` does that.

    With --tensors each tensor has a line: its type, shape and size, its largest magnitude, and how much that is of
    what fp16 can hold (65504). A checkpoint that was never verified is read for this.
    """
    from ckptguard.inspect.show import show

    settings = shared.settings([ckpt])
    with working("reading", bytes_below(ckpt)) as work:
        shown = show(ckpt, settings, magnitudes=tensors, work=work)
    warn(*(f"{name} is no regular file and was not read" for name in shown.left_out), *shown.problems)
    if shared.as_json:
        emit("show", shown)
    elif tensors:
        print_tree(shown)
    else:
        print_shown(shown)
    if shown.problems:
        raise click.exceptions.Exit(ExitCode.BAD)


def print_shown(shown: Shown) -> None:
    """What is known of the checkpoint, its files, then what was found in it."""
    from ckptguard.decisions.known_good import order_words
    from ckptguard.formats import UNSUMMED, tensor_suffix

    manifest, verdict = shown.manifest, shown.verdict
    unsummed = shown.manifest.digest_origin == "observer" and sorted(
        {f.format for f in manifest.files if f.format in UNSUMMED and (f.tensors or tensor_suffix(f.path))}
    )
    facts(
        ("checkpoint", shown.target),
        ("save", shown.id.generation if shown.id and shown.id.generation > 1 else None),
        ("series", manifest.series),
        ("layout", manifest.layout),
        ("step", manifest.step),
        ("sealed", f"{manifest.sealed_at}, digests by the {manifest.digest_origin}" if shown.sealed else "no"),
        ("verdict", verdict and f"{verdict.outcome.value}, {verdict.checked_at}, by ckptguard {verdict.version}"),
        ("changed", "yes, since that verdict: ckptguard verify reads it again" if shown.changed else None),
        ("order", f"by {order_words(manifest.step)}"),
        ("counters", ", ".join(f"{c.kind} {c.value} ({c.source})" for c in manifest.counters)),
        (
            "own checksums",
            f"none ({', '.join(unsummed)}): damage from before sealing cannot be detected" if unsummed else None,
        ),
        ("verdicts so far", ", then ".join(line.outcome.value for line in shown.history if len(shown.history) > 1)),
        ("resumable", verdict and ", ".join(verdict.facts.resumable)),
        ("metrics", ", ".join(f"{name} {value:g}" for name, value in manifest.given_metrics().items())),
        ("size", size(manifest.bytes)),
    )
    say("")
    rows = [
        (f.path.removeprefix(f"{manifest.path}/"), size(f.size), f.format, len(f.tensors), f.md5)
        for f in manifest.files
    ]
    table(("file", "size", "format", "tensors", "md5"), rows)
    print_findings(verdict.findings if verdict else (), manifest.path)


Row = tuple[str, ...]  # a name, indented by its place in the tree, and the cells after it, if it is a tensor


class TensorLine(NamedTuple):
    """One tensor: the parts of its name, how large it is, and the cells of its line."""

    parts: tuple[str, ...]
    bytes: int
    cells: tuple[str, ...]


def print_tree(shown: Shown) -> None:
    """Every tensor under its role and the parts of its name; groups say how many tensors and bytes they hold."""
    from ckptguard.formats.dtypes import FP16_LIMIT
    from ckptguard.inspect.show import stored_bytes
    from ckptguard.values.ids import in_number_order

    manifest = shown.manifest
    by_role: dict[str, list[TensorLine]] = {}
    many = sum(bool(f.tensors) for f in manifest.files) > 1
    for file in manifest.files:
        for tensor in file.tensors:
            stored, share = stored_bytes(tensor), None if tensor.largest is None else tensor.largest / FP16_LIMIT
            cells = (
                cell(tensor.dtype),
                str(list(tensor.shape)),
                size(stored),
                "-" if tensor.largest is None else f"{tensor.largest:.4g}",
                "-" if share is None else f"{100 * share:.2g}%" if share <= 1 else "beyond",
                "not finite" if (file.path, tensor.name) in shown.nonfinite else "",
                cell(file.path.removeprefix(manifest.path + "/")) if many else "",
            )
            parts = tuple(cell(p) for p in tensor.name.split(".", _DEEPEST))
            by_role.setdefault(tensor.role, []).append(TensorLine(parts, stored or 0, cells))
    rows: list[Row] = []
    for role, leaves in by_role.items():
        leaves.sort(key=lambda leaf: [in_number_order(p) for p in leaf.parts])
        rows.append((f"{role}: {_sum(leaves)}",))
        rows += _rows(leaves, 0, 1)
    titles = ("tensor", "type", "shape", "bytes", "largest", "of fp16", "remark", "file")
    titled = titles if any(len(row) > 1 for row in rows) else ()
    table(titled, rows, right=("bytes", "largest", "of fp16"), optional=("remark", "file"))


def _rows(leaves: Sequence[TensorLine], level: int, depth: int) -> Iterator[Row]:
    """The lines of tensors whose names agree in their first `level` parts."""
    for first, alike in itertools.groupby(leaves, key=lambda leaf: leaf.parts[level : level + 1]):
        group = list(alike)
        if len(group) == 1 or not first:
            yield from (("  " * depth + (".".join(leaf.parts[level:]) or "."), *leaf.cells) for leaf in group)
            continue
        shared = level + 1  # parts that all of the group have in common stay on one line
        while all(len(leaf.parts) > shared + 1 and leaf.parts[shared] == group[0].parts[shared] for leaf in group):
            shared += 1
        yield (f"{'  ' * depth}{'.'.join(group[0].parts[level:shared])}: {_sum(group)}",)
        yield from _rows(group, shared, depth + 1)


def _sum(leaves: Sequence[TensorLine]) -> str:
    return f"{len(leaves)} tensor{'s' * (len(leaves) > 1)}, {size(sum(leaf.bytes for leaf in leaves))}"
