"""One run as one call sees it: its listing, its records and its settings, read once and shared by all who need them."""

from __future__ import annotations

from collections.abc import Sequence

from ckptguard.layouts import Checkpoint
from ckptguard.records.run import Run, open_run
from ckptguard.runs.history import History, load_history
from ckptguard.runs.listing import Listing, list_run
from ckptguard.runs.sealed_content import is_good
from ckptguard.storage.protocol import Entry
from ckptguard.values.ids import CheckpointId
from ckptguard.values.settings import Settings


class RunView:
    """One run, for one call, in one thread.

    The run is listed when `checkpoints` or `entries` is first asked for, the names of its records when `history` is;
    both are remembered. Nothing is read a second time but by `look_again`, `refresh` and `forget`. Safety does not
    rest on how fresh a view is: records are created exclusively, and who comes second gets BusyError.
    """

    def __init__(self, run: Run, settings: Settings) -> None:
        self.run = run
        self.settings = settings
        self._listing: Listing | None = None
        self._history: History | None = None

    @property
    def listing(self) -> Listing:
        """The run's files; StorageError if they cannot be listed."""
        if self._listing is None:
            self._listing = list_run(self.run)
        return self._listing

    def take_listed(self, entries: Sequence[Entry]) -> None:
        """Take a listing of the run that its caller has made a moment ago, in place of one more."""
        self._listing = Listing(self.run, entries)

    def list_after(self, before: Listing | None) -> Listing:
        """List the run now. Where nothing differs from a listing `before`, that one is the answer; StorageError."""
        self._listing = list_run(self.run, before)
        return self._listing

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Every entry of the run but records and temporaries, sorted by key."""
        return self.listing.entries

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """The checkpoints in place, sorted by path."""
        return tuple(self.listing.checkpoints.values())

    @property
    def history(self) -> History:
        """What the records say."""
        if self._history is None:
            self._history = load_history(self.run)
        return self._history

    def checkpoint(self, path: str) -> Checkpoint | None:
        """The checkpoint under exactly this path, from the listing."""
        return self.listing.checkpoints.get(path)

    def look_again(self, path: str) -> Checkpoint | None:
        """The checkpoint under this path as it is now, or None: only its own entries are listed."""
        self._listing = self.listing.again(path)
        return self._listing.checkpoints.get(path)

    def refresh(self, series: str | None = None) -> None:
        """Read the names of the records again: of one series, or of all when they are next asked for."""
        if series is None:
            self._history = None
        elif self._history is not None:
            self._history.refresh(series)

    def forget(self) -> None:
        """List files and records again when they are next asked for: after many files were moved."""
        self._listing = None
        self._history = None

    def current(self, checkpoint: Checkpoint) -> CheckpointId | None:
        """The generation whose content should lie where a checkpoint lies; see `History.current`."""
        return self.history.current(checkpoint.series, checkpoint.step, checkpoint.path)

    def current_if_readable(self, checkpoint: Checkpoint) -> CheckpointId | None:
        """The same; None also if a manifest cannot be read."""
        return self.history.current_if_readable(checkpoint.series, checkpoint.step, checkpoint.path)

    def is_good(self, id: CheckpointId) -> bool:
        """Whether what was sealed under this id is good, wherever a whole copy of it lies."""
        return is_good(self.history, id)


def open_view(url: str, settings: Settings, *, must_exist: bool = True) -> RunView:
    """Open a run, and look at it. Raises what `open_run` raises."""
    return RunView(open_run(url, settings, must_exist=must_exist), settings)
