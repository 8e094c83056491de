"""The table of layouts. A new layout is one file and one line here."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping

from ckptguard.layouts.checkpoint import Layout

# Layout -> its module. The first row that accepts a folder or file decides, so the more specific ones come first.
_MODULES = {
    "ckptguard": "own",
    "hf-trainer": "hf_trainer",
    "megatron": "megatron",
    "lightning": "lightning",
    "wenet": "wenet",
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
    "dcp": "dcp",
    "hub-cache": "hub_snapshot",
    "folder": "plain_folder",
    "file": "single_file",
}


class _Layouts(Mapping[str, Layout]):
    """The rows by name. Each is loaded when first needed, because a single file needs only one layout."""

    def __init__(self) -> None:
        self._loaded: dict[str, Layout] = {}

    def __getitem__(self, name: str) -> Layout:
        row = self._loaded.get(name)
        if row is None:  # a listing of many files asks very often
            row = self._loaded[name] = importlib.import_module(f"ckptguard.layouts.{_MODULES[name]}").LAYOUT
        return row

    def __iter__(self) -> Iterator[str]:
        return iter(_MODULES)

    def __len__(self) -> int:
        return len(_MODULES)


LAYOUTS: Mapping[str, Layout] = _Layouts()
