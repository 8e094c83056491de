"""The examples of docs/reference/json.md, and what of a document is compared with them: its keys, in their order."""

import json
import re

from support.markdown import DOCS

TEXT = (DOCS / "reference/json.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```json\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
EXAMPLES = {block["command"]: block for block in map(json.loads, BLOCKS) if not {"error", "runs"} & set(block)}
[ERROR] = [block for block in map(json.loads, BLOCKS) if "error" in block]
[MANY_RUNS] = [block for block in map(json.loads, BLOCKS) if "runs" in block]
FREE = {"evidence", "dtypes", "versions", "metrics"}  # whatever the one who noticed wrote down


def shape(value):
    """The keys of a document in order, all the way down; values only by being there or null."""
    if isinstance(value, dict):
        return {key: "free" if key in FREE else shape(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value and isinstance(value[0], dict) else []
    return None


def ordered(value):
    """The same as text, so that the order of keys counts."""
    return json.dumps(value)
