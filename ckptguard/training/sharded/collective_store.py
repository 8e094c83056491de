"""The user's own files where several ranks train: `save` and `load` are called by all ranks, with the same path.

So do the frameworks' own functions want it; a function that writes on one rank only returns at once on the others.
They cannot go on behind training: they read the live state, and talk over the groups over which training talks.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

from ckptguard.errors import CkptguardError, RanksError
from ckptguard.records.run import Run
from ckptguard.training.content.tagged_json import encode_state
from ckptguard.training.ranks import Ranks, each, together
from ckptguard.training.saving.stores import Extra, UserFiles, UserStore, part_of_rank
from ckptguard.values.manifest import Manifest
from ckptguard.values.settings import Settings

_log = logging.getLogger("ckptguard")


class CollectiveStore(UserStore):
    """See `LedStore`; to be made by all ranks. What belongs to a rank (random numbers, position in the data) is
    recorded for each."""

    def __init__(self, run: Run, files: UserFiles, settings: Settings, ranks: Ranks) -> None:
        on_all = UserFiles(save=self._save_on_all, load=self._load_on_all, name=files.name)
        super().__init__(run, on_all, settings.changed(on_full="error"))  # the other ranks wait for what rank 0 does
        self._ranks, self._here = ranks, files

    def write(self, step: int, extra: Mapping[str, Any]) -> str:
        """RanksError names the ranks that could not do their part."""
        reports = together(self._ranks, f"saving step {step}", lambda: encode_state(dict(extra), path="extra"))
        if self._ranks.rank == 0:
            try:
                path = super().write(step, {"ranks": reports})
            except Exception as error:
                self._ranks.tell(["failed", str(error)])
                raise
            self._ranks.tell(["done", path])
            return path
        while True:
            order, said = self._ranks.tell(None)
            if order == "done":
                return str(said)
            if order == "failed":
                raise RanksError(f"rank 0: {said}")
            self._take_part(f"saving step {step}", functools.partial(self._here.save, said, step))

    def read(self, manifest: Manifest) -> Extra:
        """RanksError if a rank could not load it."""
        saved = super().read(manifest).get("ranks", [])
        self._ranks.tell(["extra", saved])
        return part_of_rank(self._ranks, saved)

    def finish(self, answer: object) -> None:
        self._ranks.tell(["end", answer])

    def follow(self) -> tuple[Any, Extra]:
        extra: Extra = {}
        while True:
            order, said = self._ranks.tell(None)
            if order == "end":
                return said, extra
            if order == "extra":
                extra = part_of_rank(self._ranks, said)
            else:
                self._take_part(f"loading {said}", functools.partial(self._here.load, said))

    def _save_on_all(self, place: str, step: int) -> None:
        self._ranks.tell(["save", place])
        each(self._ranks, f"saving step {step}", lambda: self._here.save(place, step))

    def _load_on_all(self, place: str) -> None:
        self._ranks.tell(["load", place])
        each(self._ranks, f"loading {place}", lambda: self._here.load(place))

    def _take_part(self, what: str, work: Callable[[], object]) -> None:
        try:
            each(self._ranks, what, work)
        except CkptguardError as error:
            _log.warning("%s", error.message)  # rank 0 has it too, and says how it ends
