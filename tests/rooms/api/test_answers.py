"""What the verbs answer with prints what the command of its name prints, and is safe in a notebook."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.html_page import Page
from support.runs import state_dict

import ckptguard
from ckptguard.api.answers import Printable, as_html
from ckptguard.documents.report_lines import Line, Table
from ckptguard.values.ids import escape

NAMES = st.text(max_size=12) | st.sampled_from(
    ["<script>alert(1)</script>", "a&b", 'x" onmouseover="y', "</td><td>", "</pre>", "\u202egnp", "\x1b[31m", "a'b", ""]
)
TAGS = {"p", "code", "b", "table", "thead", "tbody", "tr", "th", "td", "br", "pre"}
ASKED: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "known_good": (lambda run: ckptguard.known_good(run), ("known-good", "RUN")),
    "rollback": (lambda run: ckptguard.rollback(run, dry_run=True), ("rollback", "RUN", "--dry-run")),
    "restore": (lambda run: ckptguard.restore(run, run.parent / "a"), ("restore", "RUN", "--to", "a")),
    "diff": (
        lambda run: ckptguard.diff(run / "net-300.pt", run / "net-400.pt"),
        ("diff", "RUN/net-300.pt", "RUN/net-400.pt"),
    ),
    "verify": (lambda run: ckptguard.verify(run, record=False), ("verify", "RUN", "--no-record")),
    "incident": (lambda run: ckptguard.incident(run), ("incident", "RUN")),
}


@pytest.fixture
def sick(verified: Path) -> Path:
    """A run whose newest save holds NaN and a tensor with markup in its name, and which has an incident about it."""
    state = state_dict(300)
    state["embed.weight"][0, 0] = float("nan")
    state["<b>more</b>"] = torch.ones(2)
    torch.save(state, verified / "net-400.pt")
    ckptguard.verify(verified)
    return verified


@pytest.mark.parametrize("verb", ASKED)
def test_it_prints_what_the_command_prints(
    verb: str, sick: Path, invoke: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Line for line; in a shell too, and a notebook shows the same text without its markup."""
    monkeypatch.chdir(sick.parent)
    ask, (command, *words) = ASKED[verb]
    answer = ask(sick)
    if verb == "restore":  # into another folder, which the answer names
        (sick.parent / "a").rename(sick.parent / "b")
    said = invoke(command, *(word.replace("RUN", str(sick)) for word in words)).stdout
    assert isinstance(answer, Printable)
    assert f"{answer}\n" == f"{answer!r}\n" == said
    page = Page(answer._repr_html_())
    if verb != "verify":  # which has a table of its own
        rest = "".join(page.words).split()
        assert "".join(rest).lower() == "".join(said.split()).lower()
    assert {tag for tag, _ in page.tags} <= TAGS


def test_damage_of_a_side_is_said_where_the_difference_is(sick: Path, invoke: Callable[..., Any]) -> None:
    """The command warns on stderr. What is printed of an answer begins with it."""
    data = bytearray((sick / "net-400.pt").read_bytes())
    data[data.rindex(b"PK\x01\x02") + 16] ^= 1  # the CRC that the directory states for its last record
    (sick / "net-400.pt").write_bytes(data)
    done = invoke("diff", sick / "net-300.pt", sick / "net-400.pt")
    assert done.stderr.startswith("warning: ")
    assert str(ckptguard.diff(sick / "net-300.pt", sick / "net-400.pt")) + "\n" == done.stderr + done.stdout


@given(
    blocks=st.lists(
        st.builds(lambda a, b: Line(escape(a), "bad", escape(b)), NAMES, NAMES)
        | st.builds(lambda rows: Table(("one", "two"), rows), st.lists(st.tuples(NAMES, st.none() | NAMES)))
    )
)
def test_nothing_from_a_file_is_markup(blocks: list[Line | Table]) -> None:
    """Whatever names say, the tags are ours without a link or a script, and every name is there as text."""
    page = Page(as_html(blocks))
    style = {"style": "text-align:left"}
    plain = [(tag, {}) for tag in ("pre", "table", "thead", "tbody", "tr")]
    assert all(found in plain for found in page.tags if found[0] not in ("th", "td"))
    assert all(attributes == style for tag, attributes in page.tags if tag in ("th", "td"))
    text = "".join(page.words)
    assert all(escape(name) in text for name in _names(blocks))
    assert not any((ord(c) < 32 and c != "\n") or c == "\u202e" for c in text)


def _names(blocks: Iterable[Line | Table]) -> Iterator[str]:
    for block in blocks:
        if isinstance(block, Line):
            yield block.text
        else:
            yield from (str(cell or "-") for row in block.rows for cell in row)


def test_an_answer_is_still_its_value(sick: Path) -> None:
    """Its fields can be read, it can be compared, and it is no markup itself."""
    first, second = ckptguard.known_good(sick), ckptguard.known_good(sick)
    assert first == second
    assert (first.step, first.series, Path(first.path).name) == (300, "net-#.pt", "net-300.pt")
    assert html.escape(first.path) in first._repr_html_()
