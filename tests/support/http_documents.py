"""The documents that docs/reference/http.md shows, and whether an answer is like one of them."""

from __future__ import annotations

import json
import re
from typing import Any

from support.markdown import DOCS


def example(title: str) -> Any:
    """The JSON document below a heading of that page."""
    section = (DOCS / "reference/http.md").read_text(encoding="utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]
    found = re.search(r"```json\n(.*?)```", section, re.S)
    assert found is not None
    return json.loads(found[1])


def assert_like(answer: Any, shown: Any, place: str = "$") -> None:
    """The same keys in the same order and the same types all the way down; null stands for any type."""
    if isinstance(answer, dict) and isinstance(shown, dict) and not place.endswith("evidence"):
        assert list(answer) == list(shown), place
        for name in answer:
            assert_like(answer[name], shown[name], f"{place}.{name}")
    elif isinstance(answer, list) and isinstance(shown, list):
        for one in answer:
            assert_like(one, shown[0] if shown else one, f"{place}[]")
    elif answer is not None and shown is not None:
        assert type(answer) is type(shown), place
