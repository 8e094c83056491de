"""The formats of records stand in one place, which the documents repeat."""

from __future__ import annotations

import ast
from pathlib import Path

from ckptguard.values.record_formats import CHANGES, RECORDS, TABLE
from ckptguard.version import __version__

ROOT = Path(__file__).resolve().parents[3]


def test_what_is_written_the_release_before_can_read():
    """Each release reads what the other one writes, and what a person raises to is explained."""
    for name, row in TABLE.items():
        assert row.writes <= row.before_reads, name
        assert row.before_writes <= row.reads, name
        assert row.writes <= row.reads, name
    assert list(CHANGES) == list(range(2, RECORDS.reads + 1))


def test_no_format_of_a_record_is_stated_elsewhere():
    """No record in the code states a number of its own as its format: a new one would escape the table."""
    found = []
    for path in sorted([*(ROOT / "ckptguard").rglob("*.py"), *(ROOT / "daemon").rglob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "format":
                values = [node.value]
            elif isinstance(node, ast.Dict):
                pairs = zip(node.keys, node.values, strict=True)
                values = [v for k, v in pairs if isinstance(k, ast.Constant) and k.value == "format"]
            else:
                continue
            numbers = [v for v in values if isinstance(v, ast.Constant) and isinstance(v.value, int)]
            found += [f"{path.relative_to(ROOT)}:{v.lineno}" for v in numbers]
    assert [place for place in found if "held_names.py" not in place] == []  # which only compares what it read


def test_the_documents_have_the_table():
    """The page of the records has every row, and the guide what new runs have."""
    page = (ROOT / "docs/reference/records.md").read_text(encoding="utf-8")
    part = page.partition("## Formats and releases")[2].partition("\n## ")[0]
    rows = [line for line in part.splitlines() if line.startswith("|")][2:]
    assert rows == [
        f"| {name} | {row.before_reads} | {row.before_writes} | {row.reads} | {row.writes} |"
        for name, row in TABLE.items()
    ]
    assert page.startswith(f"# Records on storage, format {RECORDS.writes}\n")
    guide = (ROOT / "docs/guides/upgrading.md").read_text(encoding="utf-8")
    release = ".".join(__version__.split(".")[:2])
    assert f"| {release} | format {RECORDS.writes} | format {RECORDS.reads} |" in guide
    assert f"| {release} reads | {release} writes |" in part
