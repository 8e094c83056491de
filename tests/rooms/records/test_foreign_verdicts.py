"""A verdict is about one content: where another lies, or none is sealed, it does not exist."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.records_on_disk import at
from support.tiny_run import SERIES, TINY, content, cycle, name_of, poison, save
from support.views import look

from ckptguard.decisions.retention import Policy
from ckptguard.errors import NoKnownGoodError, RecordsError
from ckptguard.inspect.list_states import survey
from ckptguard.records.ledger import append_verdict
from ckptguard.records.run import open_run
from ckptguard.replicas.replicate import replicate
from ckptguard.retention.prune import prune
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.values.ids import CheckpointId
from ckptguard.values.manifest import content_digest
from ckptguard.values.record_text import encode_checked
from ckptguard.values.verdict import Outcome, decode_verdict

NONE = TINY.changed(keep="none")


def ledger(root: Path) -> Path:
    """The folder of the one series' verdicts."""
    return at(root, f"_ckptguard/ledger/{SERIES}")


def judged(root: Path, seeds: list[int], bad: set[int] = frozenset()) -> None:  # type: ignore[assignment]
    """A run with steps 1, 2, ... of these contents, each verified; some of them poisoned."""
    for step, seed in enumerate(seeds, 1):
        save(str(root), step, seed)
        if step in bad:
            poison(root / name_of(step) / next(iter(content(seed))))
    cycle(open_run(str(root)), NONE)


def answers(root: Path) -> tuple[str | None, list[tuple[str, str]]]:
    """What is known-good, and what `list` says of each."""
    run = open_run(str(root))
    try:
        known = str(find_known_good(run).id)
    except NoKnownGoodError:
        known = None
    return known, [(state.path, state.outcome.value) for state in survey(look(run))]


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seeds=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    bad=st.sets(st.integers(1, 3)),
    other=st.lists(st.integers(10, 19), min_size=1, max_size=3),
    other_bad=st.sets(st.integers(1, 3)),
    later=st.integers(1, 9),
    number=st.integers(1, 3),
)
def test_entries_of_another_run_change_no_answer(
    tmp_path_factory: pytest.TempPathFactory,
    seeds: list[int],
    bad: set[int],
    other: list[int],
    other_bad: set[int],
    later: int,
    number: int,
) -> None:
    """Whatever the two runs hold, under whatever number an entry comes: also where nothing is sealed yet."""
    root, foreign = tmp_path_factory.mktemp("own"), tmp_path_factory.mktemp("foreign")
    judged(root, seeds, bad)
    judged(foreign, other, other_bad)
    save(str(root), len(seeds) + 1, later)  # not seen yet
    before = answers(root)
    for path in ledger(foreign).iterdir():
        id, _, outcome, _ = path.name.rsplit(".", 3)
        target = ledger(root) / f"{id}.{number:04d}.{outcome}.json"
        if not target.exists():
            shutil.copyfile(path, target)
    assert answers(root) == before, "an entry of another run told something"
    cycle(open_run(str(root)), NONE)  # what nobody judged is judged, whatever is said of it
    assert answers(root)[1][-1] == (name_of(len(seeds) + 1), "good")


def test_a_policy_is_told_when_the_newest_entry_is_another_runs(tmp_path: Path) -> None:
    """Nothing is removed on the word of an entry that does not exist."""
    judged(tmp_path / "own", [1, 2, 3], {1})
    judged(tmp_path / "foreign", [11])
    [entry] = ledger(tmp_path / "foreign").iterdir()
    shutil.copyfile(entry, ledger(tmp_path / "own") / "000000000001.1.0002.good.json")
    with pytest.raises(RecordsError, match="the verdict 2 on 1"):
        prune(look(str(tmp_path / "own"), NONE), Policy(keep_last=1), grace=60.0)


def test_entries_of_older_versions_count(tmp_path: Path) -> None:
    """They do not say what they are about."""
    judged(tmp_path, [1])
    [entry] = ledger(tmp_path).iterdir()
    verdict = decode_verdict(entry.read_bytes())
    assert verdict.manifest
    entry.write_bytes(encode_checked(msgspec.structs.replace(verdict, format=2, manifest="")))
    assert answers(tmp_path) == ("1.1", [(name_of(1), "good")])
    entry.write_bytes(encode_checked(msgspec.structs.replace(verdict, manifest="00" * 16)))
    assert answers(tmp_path) == (None, [(name_of(1), "pending")])


def test_every_new_entry_names_its_content(tmp_path: Path) -> None:
    """Also one that builds on an older version's, and one that a replica gets, whose manifest has other times."""
    judged(tmp_path / "run", [1, 2])
    run = open_run(str(tmp_path / "run"))
    for step in (1, 2):
        history = look(run).history
        verdict = history.verdict(CheckpointId(SERIES, step, 1))
        assert verdict is not None
        append_verdict(run, msgspec.structs.replace(verdict, format=2, manifest=""))
        history.add_verdict(msgspec.structs.replace(verdict, format=2, manifest="", outcome=Outcome.GOOD))
    replicate(look(run), str(tmp_path / "replica"))
    for root in (tmp_path / "run", tmp_path / "replica"):
        history = look(str(root)).history
        for step in (1, 2):
            id = CheckpointId(SERIES, step, 1)
            manifest, verdict = history.manifest(id), history.verdict(id)
            assert manifest is not None
            assert verdict is not None
            assert (verdict.format, verdict.manifest) == (3, content_digest(manifest.files))
