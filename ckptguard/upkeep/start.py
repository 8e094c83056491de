"""What a pass begins from: the run's files and the names of its records, each by one listing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ckptguard.records.names_by_step import FOLDERS
from ckptguard.records.pins import FOLDER as PINS
from ckptguard.records.quarantine import FOLDER as QUARANTINE
from ckptguard.records.run import Run, record_names
from ckptguard.records.trash import FOLDER as TRASH
from ckptguard.runs.listing import Listing
from ckptguard.runs.run_view import RunView
from ckptguard.values.settings import Settings

_COUNTED = tuple(f"{folder}/" for folder in (*FOLDERS, TRASH, PINS))  # what a pass looks at, but for what is due


@dataclass(frozen=True)
class Start:
    """Two that are equal mean: nothing that a pass goes by has changed."""

    listing: Listing  # the same one while no entry differs
    names: frozenset[str]
    settings: Settings

    @cached_property
    def has_trash(self) -> bool:
        """Whether anything lies in the trash."""
        return any(name.startswith(f"{TRASH}/") for name in self.names)

    @cached_property
    def has_unfinished_quarantines(self) -> bool:
        """Whether a checkpoint was marked to be moved aside, and not that it was moved."""
        own = [name for name in self.names if name.startswith(f"{QUARANTINE}/") and name.count("/") == 2]
        moved = {name.removesuffix(".moved") for name in own if name.endswith(".moved")}
        return any(name.removesuffix(".json") not in moved for name in own if name.endswith(".json"))


def start_of(view: RunView, before: Start | None) -> Start:
    """Look at a run anew. StorageError if it cannot be listed."""
    names = _names(view.run)
    view.forget()
    same = before is not None and before.names == names
    listing = view.list_after(before.listing if before is not None and same else None)
    return Start(listing=listing, names=names, settings=view.settings)


def _names(run: Run) -> frozenset[str]:
    """The names of the records that a pass looks at."""
    return frozenset(name for name in record_names(run, "") if name.startswith(_COUNTED))
