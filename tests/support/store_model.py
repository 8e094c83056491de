"""What a model of dicts knows of a store: see `campaigns/test_store_machine.py`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from blake3 import blake3

from ckptguard.records.kept import read_kept
from ckptguard.records.run import open_run
from ckptguard.retention.prune import _look
from ckptguard.runs.history import History, load_history
from ckptguard.values.ids import CheckpointId
from ckptguard.values.manifest import Manifest
from ckptguard.values.verdict import Outcome
from support.tiny_run import SERIES, TINY, Content, candidates, files_below, name_of
from support.views import look

Key = tuple[int, int]
ALL = range(100, 1000, 100)


def key_of(id: CheckpointId) -> Key:
    """A checkpoint of the one series there is."""
    assert isinstance(id.step, int)
    return id.step, id.generation


def names(manifest: Manifest, content: Content) -> bool:
    """Whether these are the bytes that a manifest names."""
    for file in manifest.files:
        data = rest = content.get(file.path.rpartition("/")[2], b"")
        for span in reversed(file.spans):
            end = span.offset + span.length
            if blake3(data[span.offset : end]).hexdigest() != span.blake3:
                return False
            rest = rest[: span.offset] + rest[end:]
        if len(data) != file.size or blake3(rest).hexdigest() != file.envelope:
            return False
    return True


class StoreModel:
    """Which content was sealed under which generation, which verdicts were given, and what follows from it. `half` are
    steps whose save in place did not finish. `lain` is all that the trainer wrote."""

    url: str
    sealed: dict[Key, list[Content]]
    outcomes: dict[Key, Outcome]
    pinned: set[Key]
    half: set[int]
    lain: dict[int, list[Content]]

    def known_good(self, history: Any) -> Key | None:
        """By the model: the newest GOOD generation that is in place with its size, and not saved over since, or has a
        kept copy."""
        changed = {key_of(c.id) for c in candidates(history.run) if c.in_place and c.changed}
        for key in sorted((k for k, o in self.outcomes.items() if o in (Outcome.GOOD, Outcome.BAD)), reverse=True):
            in_place = self.current(key[0], history) == key and self.has_sizes(key) and key not in changed
            if self.outcomes[key] is Outcome.GOOD and in_place:
                return key
            copy = read_kept(history.run, CheckpointId(SERIES, *key))
            if copy is not None and any(key_of(c.id) == key for c in candidates(history.run)):
                here = files_below(self.url, f"_ckptguard/{copy.checkpoint_key}")
                assert {n: len(d) for n, d in here.items()} == {n: len(d) for n, d in self.sealed[key][0].items()}
                return key
        return None

    @contextlib.contextmanager
    def passing(self, *, sure: bool = True) -> Iterator[None]:
        """An operation runs: afterwards the model takes over what it sealed and judged, and holds it against what the
        model knows of the bytes."""
        history = load_history(self.run_of())
        lay = {step: self.current(step, history) for step in ALL}
        whole = {key for key in self.sealed if self.is_whole(key, lay[key[0]])}
        with self.sealing():
            yield
        history = load_history(self.run_of())
        for id, current_verdict in history.current_verdicts(SERIES).items():
            key = key_of(id)
            was, outcome = self.outcomes.get(key), current_verdict.outcome
            if was is outcome:
                continue
            if outcome is Outcome.GOOD:
                assert key in self.sealed, key
                assert was is not Outcome.SUSPECT, f"suspicion of {key} was lifted"
            if outcome is Outcome.BAD and sure:
                seen = lay[key[0]] if was is None else key  # what is sealed now lay there as the one before
                assert seen not in whole or key[0] in self.half, f"{key} is whole, and BAD: {history.verdict(id)}"
            self.outcomes[key] = outcome

    @contextlib.contextmanager
    def sealing(self) -> Iterator[None]:
        """What is sealed meanwhile is one of the contents that lay there before or after, or that has a copy of its own
        since it lay there: the one that it names."""
        before = {step: files_below(self.url, name_of(step)) for step in ALL}
        yield
        after = {step: files_below(self.url, name_of(step)) for step in ALL}
        history = load_history(self.run_of())
        for id in history.sealed(SERIES):
            key = key_of(id)
            if key not in self.sealed:
                quiet, manifest = [before[key[0]], after[key[0]]], history.manifest(id)
                copy = read_kept(history.run, id)
                kept = files_below(self.url, f"_ckptguard/{copy.checkpoint_key}") if copy is not None else {}
                quiet += [kept] if kept in self.lain.get(key[0], []) else []
                found = [c for i, c in enumerate(quiet) if c and c not in quiet[:i]]
                self.sealed[key] = [c for c in found if manifest is not None and names(manifest, c)]
                assert self.sealed[key], f"{key} was sealed, and never lay there"

    # What the model knows.

    def run_of(self) -> Any:
        """The run, opened as any process opens it."""
        return open_run(self.url)

    def current(self, step: int, history: History | None = None) -> Key | None:
        """The generation whose content should lie in place: the newest that was sealed, unless one of its number or
        above was quarantined. `history` where it was just read."""
        history = history or load_history(self.run_of())
        found = history.current(SERIES, step, name_of(step))
        return key_of(found) if found is not None else None

    def contents(self, step: int) -> list[Content]:
        """What was ever sealed under a step."""
        return [content for key, found in self.sealed.items() if key[0] == step for content in found]

    def has_sizes(self, key: Key) -> bool:
        """Whether what lies in place has the names and sizes that were sealed."""
        here = files_below(self.url, name_of(key[0]))
        sizes = {name: len(data) for name, data in self.sealed[key][0].items()}
        return sizes.items() <= {name: len(data) for name, data in here.items()}.items()

    def whole_in_place(self, step: int) -> bool:
        """Whether what lies in place is what was sealed."""
        key = self.current(step)
        return key is not None and files_below(self.url, name_of(step)) in self.sealed[key]

    def whole_anywhere(self, candidate: Any) -> bool:
        """Whether the bytes of a known-good one are whole, in place or kept."""
        contents = self.sealed[key_of(candidate.id)]
        here = files_below(self.url, name_of(candidate.id.step))
        if here in contents and self.current(candidate.id.step) == key_of(candidate.id):
            return True
        copy = candidate.copy
        return copy is not None and files_below(self.url, f"_ckptguard/{copy.checkpoint_key}") in contents

    def is_whole(self, key: Key, current: Key | None) -> bool:
        """Whether a generation's bytes are as they were sealed: in place where it is the current one, else kept, for
        what was saved over has no other place."""
        if key == current:
            return files_below(self.url, name_of(key[0])) in self.sealed[key]
        copy = read_kept(self.run_of(), CheckpointId(SERIES, *key))
        return copy is not None and files_below(self.url, f"_ckptguard/{copy.checkpoint_key}") in self.sealed[key]

    def must_stay(self) -> set[int]:
        """The steps that no policy may remove: pinned, among the newest two good ones, or older than a pending one."""
        seen = _look(look(self.run_of()), 1).present
        good = sorted((p.id.step for p in seen if p.outcome is Outcome.GOOD and p.id.step is not None), reverse=True)
        pending = max((p.id.step or 0 for p in seen if p.outcome is Outcome.PENDING), default=0)
        held = {p.id.step for p in seen if key_of(p.id) in self.pinned}
        return {s for s in {p.id.step for p in seen} if s is not None and (s in good[:2] or s <= pending or s in held)}

    def untrashed(self, step: int) -> bool:
        """Whether the checkpoint in place counts."""
        return any(p.id.step == step for p in _look(look(self.run_of()), 1).present)

    def newest_are_kept(self) -> None:
        """The newest two good ones that lie in place have a copy."""
        run = self.run_of()
        history = load_history(run)
        for key in [key_of(c.id) for c in candidates(run)][: TINY.keep_good]:
            current = self.current(key[0], history) == key
            if current and self.is_whole(key, key) and self.untrashed(key[0]):
                assert read_kept(run, CheckpointId(SERIES, *key)) is not None, f"{key} has no copy"
