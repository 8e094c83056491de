"""Laws of the page's pure modules, in a browser without a daemon: what is saved, the tree of tensors, the heat map."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import ckptguard_daemon
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

PAGE = Path(ckptguard_daemon.__file__).parent / "page"
ORIGIN = "http://page.test"
FORMULA = "=+-@\t\r\uff1d\uff0b\uff0d\uff20"
NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?(e[+-]?\d+)?|inf)", re.IGNORECASE)
NAMES = st.text(st.sampled_from([*"ab.=+-@\"',;\n\t\r<>&", "\u202e", "\uff1d", "م", "😀"]), max_size=40) | st.text(
    max_size=60
)
few = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    """A page from which the modules can be imported."""
    library = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs chromium: apt-get install chromium")
    with library.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        yield _page(browser)
        browser.close()


def _page(browser: Any) -> Any:
    opened = browser.new_page()

    def answer(route: Any) -> None:
        path = route.request.url.removeprefix(ORIGIN).strip("/")
        if path:
            route.fulfill(body=(PAGE / path).read_bytes(), content_type="text/javascript")
        else:
            route.fulfill(body="<!doctype html>", content_type="text/html")

    opened.route("**/*", answer)
    opened.goto(ORIGIN)
    return opened


def ask(page: Any, module: str, body: str, argument: object) -> Any:
    """What an expression over a module `m` and an argument `a` is."""
    return json.loads(
        page.evaluate(
            f"async (text) => {{ const m = await import('/js/{module}'); const a = JSON.parse(text); "
            f"return JSON.stringify({body}); }}",
            json.dumps(argument),
        )
    )


@few
@given(texts=st.lists(NAMES, min_size=1, max_size=20))
def test_no_saved_text_is_a_formula(page: Any, texts: list[str]) -> None:
    """Each text comes back from the CSV in one cell, and no spreadsheet would calculate it."""
    columns = '[{ title: "=name", key: 0 }, { title: "x", key: 1 }]'
    text = ask(page, "export/files.js", f"m.csvText({columns}, a)", [[one, -1.5] for one in texts])
    seen = ask(page, "text.js", "a.map(m.visible)", texts)
    head, *rows = csv.reader(io.StringIO(text))
    assert head == ["'=name", "x"]
    assert [row[1] for row in rows] == ["-1.5"] * len(texts)
    for (cell, _), shown in zip(rows, seen, strict=True):
        assert cell.removeprefix("'") == shown.removeprefix("'")
        assert not cell.lstrip(" ").startswith(tuple(FORMULA)) or NUMBER.fullmatch(cell)


def test_half_a_character_can_be_saved(page: Any) -> None:
    """Half a character and a control character are written as escapes, in CSV and in JSON."""
    name = '{ name: String.fromCharCode(0xd800) + "\\u0000" }'
    columns = '[{ title: "name", key: "name" }]'
    assert ask(page, "export/files.js", f"m.csvText({columns}, [{name}])", 0) == '"name"\r\n"\\ud800\\u0000"\r\n'
    text = ask(page, "export/files.js", f"m.jsonText({columns}, [{name}])", 0)
    assert json.loads(text) == [{"name": "\ud800\x00"}]


@few
@given(names=st.lists(NAMES | st.integers(1, 400).map(lambda n: "a." * n + "w"), max_size=30), roles=st.integers(1, 2))
def test_the_tree_has_every_tensor_once_under_its_name(page: Any, names: list[str], roles: int) -> None:
    """Opened wholly, the tree lists each tensor once, and the labels on the way to it are its name."""
    tensors = [{"name": name, "role": f"role{i % roles}", "largest": 1.0} for i, name in enumerate(names)]
    body = """(() => {
      const root = m.buildTree(a);
      const every = { has: () => true };
      const path = [];
      return m.openRows(root, every).map(({ node, level }) => {
        path.length = level - 1;
        path.push(node.label);
        return node.tensor ? [node.index, path.join("."), root.count] : null;
      }).filter(Boolean);
    })()"""
    found = ask(page, "tensors/tree.js", body, tensors)
    assert sorted(index for index, _, _ in found) == list(range(len(names)))
    several = len({tensor["role"] for tensor in tensors}) > 1
    for index, label, count in found:
        assert label == (f"{tensors[index]['role']}." if several else "") + names[index]
        assert count == len(names)


_VALUES = st.none() | st.floats(0, 1e30) | st.sampled_from(["nan", "inf", "-inf"])


@st.composite
def maps(draw: st.DrawFn) -> dict[str, Any]:
    """A heat map's document."""
    columns = draw(st.integers(1, 6))
    names = draw(st.lists(NAMES, min_size=1, max_size=8))
    cells = st.tuples(st.integers(0, len(names) - 1), st.integers(0, columns - 1))
    bad = draw(st.lists(cells, unique=True, max_size=4))
    return {
        "checkpoints": [{"name": f"n{i}", "step": i * 10, "outcome": "good"} for i in range(columns)],
        "tensors": [{"name": name, "role": "model", "dtype": "F32"} for name in names],
        "largest": [draw(st.lists(_VALUES, min_size=columns, max_size=columns)) for _ in names],
        "bad": [[tensor, column, "1 NaN"] for tensor, column in bad],
        "first_bad": list(bad[0]) if bad else None,
    }


@few
@given(heat=maps(), mode=st.sampled_from(["magnitude", "change"]))
def test_each_cell_has_a_colour_a_pattern_or_nothing(page: Any, heat: dict[str, Any], mode: str) -> None:
    """A share lies within the scale; what is bad has the pattern; what no record tells has neither."""
    body = f"(({{ shares, low, high }}) => [shares.map((row) => [...row]), low, high])(m.heatModel(a, {mode!r}))"
    shares, low, high = ask(page, "charts/heat_model.js", body, heat)
    assert low < high
    bad = {(tensor, column) for tensor, column, _ in heat["bad"]}
    for tensor, row in enumerate(shares):
        for column, share in enumerate(row):
            assert (share == -2) == ((tensor, column) in bad)
            assert share in (-1, -2) or -1e-6 <= share <= 1 + 1e-6
            if heat["largest"][tensor][column] is None:
                assert share in (-1, -2)


@few
@given(heat=maps(), title=NAMES)
def test_a_picture_is_xml_whatever_the_names_are(page: Any, heat: dict[str, Any], title: str) -> None:
    """The picture is one XML document, in which a name is text."""
    rows = "a.heat.tensors.map((_, i) => i)"
    body = f"heatPicture({{ title: a.title, heat: a.heat, model, rows: {rows}, first: a.heat.first_bad }})"
    text = page.evaluate(
        "async (given) => { const a = JSON.parse(given);"
        "const { heatModel } = await import('/js/charts/heat_model.js');"
        "const { heatPicture } = await import('/js/export/pictures.js');"
        f"const model = heatModel(a.heat, 'magnitude'); return {body}; }}",
        json.dumps({"heat": heat, "title": title}),
    )
    kinds = {element.tag.rpartition("}")[2] for element in ElementTree.fromstring(text).iter()}
    assert kinds <= {"svg", "rect", "text", "defs", "pattern", "linearGradient", "stop"}
