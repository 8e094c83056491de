"""What a model of one run holds against it: see `trainer_machine.py`."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ckptguard.errors import NoKnownGoodError
from ckptguard.inspect.list_states import survey
from ckptguard.inspect.status import status
from ckptguard.records.kept import list_kept, read_kept
from ckptguard.records.run import Run, open_run
from ckptguard.runs.find_known_good import Candidate, KnownGood, Wanted, find_known_good, known_good_candidates
from ckptguard.runs.history import History, load_history
from ckptguard.runs.run_view import RunView
from ckptguard.values.ids import CheckpointId
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome
from support.records_on_disk import files_of
from support.trainer_world import Content, Training, is_of
from support.views import look


class TrainerPromises:
    """Which content was sealed under which id, and of each series the newest good one that must come back."""

    url: str
    training: Training
    settings: Settings
    sealed: dict[CheckpointId, Content]
    promised: dict[str, CheckpointId]
    ledger: set[tuple[str, str]]

    def learns(self) -> None:
        """Take over what was sealed: contents that the trainer wrote. What is GOOD of them is whole and finite."""
        history = load_history(self.run())
        knows = self.training.knows
        names = {(series, name) for series, names in history.names.items() for name in names}
        assert self.ledger <= names, "a verdict was lost"
        self.ledger = names
        for series in history.names:
            for id in history.sealed(series):
                if id not in self.sealed:
                    manifest = history.manifest(id)
                    assert manifest is not None
                    found = next((content for content in knows if is_of(manifest, content)), None)
                    assert found is not None, f"{id} was sealed, and the trainer never wrote it"
                    self.sealed[id] = found
            for id, current_verdict in history.current_verdicts(series).items():
                if current_verdict.outcome is Outcome.GOOD:
                    assert knows[self.sealed[id]].is_healthy, f"{id} is GOOD, and {knows[self.sealed[id]]}"

    def answers_are_what_was_judged(self) -> None:
        """Every door that calls something good shows where what was judged lies."""
        run = self.run()
        with contextlib.suppress(NoKnownGoodError):
            self.is_what_was_judged(find_known_good(run), "known-good")
        said = status(self.view()).known_good
        if said is not None:
            self.is_what_was_judged(said, "status")
        for candidate in self.candidates():
            if not candidate.changed:  # else whoever asks for it reads it
                self.is_what_was_judged(candidate.answer, "a candidate")
        for state in survey(self.view()):
            if state.outcome is Outcome.GOOD and state.in_place and not state.changed:
                assert state.id is not None
                lies = self.training.disk.at(state.path)
                assert lies == self.sealed[state.id], f"list: {state.id} is good, and {state.path} is another one"

    def is_what_was_judged(self, answer: KnownGood, door: str) -> None:
        """The bytes where an answer points are those that were judged."""
        place = self.path_of(answer.id)
        if answer.kept:
            copy = read_kept(self.run(), answer.id)
            assert copy is not None, f"{door}: {answer}"
            place = f"_ckptguard/{copy.checkpoint_key}"
        if answer.kept and "://" not in answer.path:
            shown = tuple(sorted(files_of(answer.path).items())) or (("", Path(answer.path).read_bytes()),)
            assert shown == self.sealed[answer.id], f"{door}: {answer}"
        else:
            assert answer.path.endswith(place), f"{door}: {answer}"
        assert self.training.disk.at(place) == self.sealed[answer.id], f"{door}: {answer.id} at {place} is another one"

    def kept_its_promises(self) -> None:
        """What was promised comes back byte for byte, or a newer good one does."""
        for series, id in self.promised.items():
            if not any(self.has_bytes(c) for c in self.candidates(series) if self.keeps(id, c.id)):
                good = self.good(load_history(self.run()), series)
                assert any(self.lies(one) for one in good if self.keeps(id, one)), f"{id} was promised, and is lost"

    def keeps(self, promised: CheckpointId, id: CheckpointId) -> bool:
        """Whether a promise is kept by this one: it is newer, or the same content."""
        return id.order >= promised.order or self.sealed[id] == self.sealed[promised]

    def has_bytes(self, found: Candidate) -> bool:
        """Whether a known-good one is where it is said to be."""
        place = found.manifest.path if found.in_place else f"_ckptguard/{found.copy.checkpoint_key}"  # type: ignore[union-attr]
        return self.training.disk.at(place) == self.sealed[found.id]

    def lies(self, id: CheckpointId) -> bool:
        """Whether its bytes lie in place, by whatever times, or in its kept copy; or in a copy of its series that waits
        for a verdict of its own, for its place was touched."""
        run, history = self.run(), load_history(self.run())
        waiting = [one for one in list_kept(run) if one.series == id.series and not history.has_verdict(one)]
        copies = [read_kept(run, one) for one in (id, *waiting)]
        places = [f"_ckptguard/{c.checkpoint_key}" for c in copies if c is not None and (c.id == id or c.whole)]
        places.append(self.path_of(id))
        return any(self.training.disk.at(place) == self.sealed[id] for place in places)

    def promises_what_is_whole(self) -> None:
        """Promise the newest good one of each series, of those that are whole somewhere."""
        history = load_history(self.run())
        for series in history.names:
            found = next((id for id in self.good(history, series) if self.lies(id)), None)
            if found is not None:
                self.promised[series] = found

    def promises_what_is_left(self) -> None:
        """Before a rollback, promise what keeps a promise instead of what was promised first: that may be gone since
        there are newer ones, and these may be given up."""
        history = load_history(self.run())
        for series, id in self.promised.items():
            kept = [one for one in self.good(history, series) if self.keeps(id, one) and self.lies(one)]
            self.promised[series] = kept[-1] if kept and id not in kept else id

    def promises_less(self) -> None:
        """Hold no promise any more about what was taken back."""
        view = self.view()
        self.promised = {series: id for series, id in self.promised.items() if view.is_good(id)}

    def good(self, history: History, series: str) -> list[CheckpointId]:
        """The good generations of a series, newest first."""
        view = self.view()
        ids = [id for id in history.sealed(series) if view.is_good(id)]
        return sorted(ids, key=lambda id: id.order, reverse=True)

    # What both need.

    def run(self) -> Run:
        """The run, opened as any process opens it."""
        return open_run(self.url)

    def view(self) -> RunView:
        """A fresh look at it."""
        return look(self.run(), self.settings)

    def candidates(self, series: str | None = None) -> list[Candidate]:
        """All that may be called known-good, best first."""
        return list(known_good_candidates(self.view(), Wanted(series=series)))

    def path_of(self, id: CheckpointId) -> str:
        """Where a generation lay."""
        manifest = load_history(self.run()).manifest(id)
        assert manifest is not None
        return manifest.path
