"""What a reader of source code reads: its docstrings, its comments and every text that it may show."""

from __future__ import annotations

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from typing import Literal, NamedTuple

_HOLE = "value"  # stands for what an f-string puts in: it counts as one word
_DIRECTIVE = re.compile(r"#\s*(?:noqa|type:|pragma|ruff:|mypy:|!)")
_REGEX = re.compile(r"\(\?|\\[wdsbS]|\[[^\]]*\][+*]")


class Text(NamedTuple):
    """One text of a file. `line` is where it starts."""

    line: int
    kind: Literal["docstring", "comment", "message"]
    text: str


def texts_of(source: str) -> list[Text]:
    """Every docstring, comment and message of a Python file, by line.

    A message is any other string: an f-string with its holes filled, or strings joined by `+`, as one text. A regular
    expression is none, nor is a list of words that the file splits.
    """
    tree = ast.parse(source)
    found = [*_strings(tree, _split_tables(tree)), *_comments(source)]
    return sorted(found, key=lambda text: text.line)


def _strings(node: ast.AST, tables: set[int]) -> Iterator[Text]:
    if id(node) in tables:
        return
    if isinstance(node, ast.Expr) and (words := _plain(node.value)) is not None:
        yield Text(node.lineno, "docstring", inspect.cleandoc(words))
        return
    if isinstance(node, ast.expr) and (words := _plain(node)) is not None:
        if not _REGEX.search(words):
            yield Text(node.lineno, "message", words)
        for inside in _holes(node):
            yield from _strings(inside, tables)
        return
    for child in ast.iter_child_nodes(node):
        yield from _strings(child, tables)


def _plain(node: ast.expr) -> str | None:
    """Return the text of a string expression with its holes filled. None for any other expression."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(_plain(part) or "" if isinstance(part, ast.Constant) else _HOLE for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = _plain(node.left), _plain(node.right)
        return None if sides == (None, None) else "".join(_HOLE if side is None else side for side in sides)
    return None


def _holes(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.JoinedStr):
        yield from (part.value for part in node.values if isinstance(part, ast.FormattedValue))
    elif isinstance(node, ast.BinOp):
        for side in (node.left, node.right):
            yield from [side] if _plain(side) is None else _holes(side)


def _split_tables(tree: ast.AST) -> set[int]:
    """Return the ids of the strings that are lists of words: `.split()` is called on them or on their name."""
    split = [
        node.func.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "split"
    ]
    names = {node.id for node in split if isinstance(node, ast.Name)}
    assigned = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id in names for target in node.targets)
    ]
    return {id(node) for node in (*split, *assigned) if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp)}


def _comments(source: str) -> Iterator[Text]:
    """Yield each comment: the lines of a block as one text, a comment behind code by itself."""
    block: list[str] = []
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or _DIRECTIVE.match(token.string):
            continue
        line, alone = token.start[0], not token.line[: token.start[1]].strip()
        if block and not (alone and line == last + 1):
            yield Text(last - len(block) + 1, "comment", "\n".join(block))
            block = []
        block.append(token.string.lstrip("# "))
        last = line if alone else -1
        if not alone:
            yield Text(line, "comment", block.pop())
    if block:
        yield Text(last - len(block) + 1, "comment", "\n".join(block))
