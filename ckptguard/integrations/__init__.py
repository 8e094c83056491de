"""One file per framework; each is loaded on first use and imports its framework then."""

from __future__ import annotations

import importlib

_MODULES = ("accelerate", "deepspeed", "lightning", "tracking", "transformers")


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(_MODULES)
