"""A run is silenced from the moment that somebody says so until its time is over, and in doubt it is not."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptguard.errors import CouldNotTellError, NotFoundError, SettingsError, StorageError
from ckptguard.records import silences
from ckptguard.records.pins import pin_checkpoint
from ckptguard.records.run import Run, begin_run
from ckptguard.records.silences import end_silence, read_silence, silence_end, silence_now, silence_run
from ckptguard.storage.local.local_storage import LocalStorage
from ckptguard.values.ids import CheckpointId
from ckptguard.values.silence import LONGEST, Silence, as_of

DAY, BEGAN = 86400.0, 1_800_000_000.0
SPANS = st.sampled_from([1.0, 3600.0, DAY, LONGEST])
DAMAGE = {
    "empty": b"",
    "cut short": b'{"format":1,"began":19',
    "another form": b"[]",
    "no time": b'{"format":1,"run":"","began":1,"until":"tomorrow","reason":"","by":"","at":""}',
    "of a later release": b'{"format":2,"began":1,"until":1900000000,"reason":"","by":"","at":"","only":["replica"]}',
}
ACTS = st.one_of(
    st.tuples(st.just("silence"), SPANS),
    st.tuples(st.just("end"), st.just(0.0)),
    st.tuples(st.just("time passes"), SPANS | st.just(0.999)),
    st.tuples(st.just("the clock is put back"), SPANS | st.just(40 * DAY)),
    st.tuples(st.sampled_from(sorted(DAMAGE)), st.just(0.0)),
)


def at_time(now: float):
    """The clock stands."""
    return mock.patch.object(silences, "time", SimpleNamespace(time=lambda: now))


def new_run(folder) -> Run:
    """A run with records."""
    run = begin_run(str(folder))
    pin_checkpoint(run, CheckpointId("model-#", 1, 1))
    return run


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Gives new folders, one for each example."""
    left = itertools.count()
    return lambda: tmp_path_factory.mktemp(f"run-{next(left)}")


def replaced(run: Run, data: bytes) -> None:
    """Other bytes in the newest record."""
    for path in sorted(silences_of(run))[-1:]:
        path.write_bytes(data)


def silences_of(run: Run):
    """The files of the records."""
    return list(Path(run.url, "_ckptguard", "silences").glob("*"))


def holds(said, now: float) -> bool:
    """Whether a silence with these times is one now."""
    return isinstance(said, tuple) and said[0] <= now + DAY and now < said[1] <= now + 31 * DAY


@settings(max_examples=60, database=None)
@given(acts=st.lists(st.tuples(st.booleans(), ACTS), max_size=12))
def test_a_run_is_silenced_exactly_until_its_time_is_over(acts, place):
    """Whatever was done to two runs and to the clock. What is said of one run is never true of the other."""
    folder, now = place(), BEGAN
    runs = [new_run(folder / name) for name in ("a", "b")]
    expected: list[tuple[float, float] | str | None] = [None, None]  # from when until when
    for which, (act, seconds) in acts:
        run = runs[which]
        with at_time(now):
            if act == "silence":
                silence_run(run, now + seconds, reason="why", by="alice@node1")
                expected[which] = now, now + seconds
            elif act == "end":
                if expected[which] == "damaged" or holds(expected[which], now):
                    end_silence(run)
                else:
                    with pytest.raises(NotFoundError):
                        end_silence(run)
                expected[which] = None  # also one that a wrong clock dated
            elif act == "time passes":
                now += seconds
            elif act == "the clock is put back":
                now -= seconds
            else:
                replaced(run, DAMAGE[act])
                expected[which] = "damaged" if expected[which] is not None else None
        with at_time(now):
            for one, said in zip(runs, expected, strict=True):
                found, shown = silence_now(one), as_of(read_silence(one), now)
                assert (found is not None) == holds(said, now)
                assert shown == (Silence() if said == "damaged" else found)
                if found is not None:
                    assert (found.until, found.reason, found.by) == (said[1], "why", "alice@node1")
                assert len(silences_of(one)) <= 1
    shutil.rmtree(folder)


def test_the_newest_of_two_counts_also_if_the_old_one_stays(tmp_path, monkeypatch):
    """Who is killed between the new record and the removal of the old one has silenced the run as they said."""
    run = new_run(tmp_path / "run")
    silence_run(run, silences.time.time() + 60.0, reason="first", by="a")
    with monkeypatch.context() as killed:
        killed.setattr(silences, "_remove", lambda run, names: None)
        silence_run(run, silences.time.time() + 7200.0, reason="second", by="b")
    assert len(silences_of(run)) == 2
    assert silence_now(run).reason == "second"


def test_an_end_that_is_killed_brings_no_older_silence_back(tmp_path, monkeypatch):
    """At whichever removal it is killed: the newest record counts until it is gone, and then there is none."""
    run = new_run(tmp_path / "run")
    with monkeypatch.context() as killed:
        killed.setattr(silences, "_remove", lambda run, names: None)
        for reason in ("first", "second", "third"):
            silence_run(run, silences.time.time() + 60.0, reason=reason, by="a")
    honest, left = LocalStorage.remove, []

    def once(storage, key):
        if left:
            raise StorageError("killed", key=key)
        left.append(key)
        honest(storage, key)

    for _ in range(3):
        monkeypatch.setattr(LocalStorage, "remove", once)
        left.clear()
        try:
            end_silence(run)
        except StorageError:
            assert silence_now(run).reason == "third"
    monkeypatch.undo()
    assert silence_now(run) is None
    assert silences_of(run) == []


def test_records_that_cannot_be_read_silence_nothing(tmp_path, monkeypatch):
    """A storage that fails in any way costs no message, and raises nothing where one is about to be sent."""
    run = new_run(tmp_path / "run")
    silence_run(run, silences.time.time() + 60.0, reason="", by="a")
    for error in (CouldNotTellError("no"), StorageError("no", key="k"), OSError("no"), ValueError("no")):
        with monkeypatch.context() as broken:
            broken.setattr(LocalStorage, "open", mock.Mock(side_effect=error))
            assert silence_now(run) is None
    assert silence_now(run) is not None


def test_a_run_without_records_gets_none(tmp_path):
    """A folder of ours in an empty run would be in the way of its trainer."""
    run = begin_run(str(tmp_path / "run"))
    with pytest.raises(NotFoundError):
        silence_run(run, silences.time.time() + 60.0, reason="", by="a")
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize("when", ["31d", "0s", "2020-01-01", "soon", "", "-1h", "9999-12-31", "nan"])
def test_no_silence_is_longer_than_it_may_be(when):
    """Nor does it end before it begins."""
    with pytest.raises(SettingsError):
        silence_end(when)


def test_texts_of_records_are_safe_to_show(tmp_path):
    """Whatever a reason or a name holds."""
    run = new_run(tmp_path / "run")
    silence_run(run, silences.time.time() + 60.0, reason="a\x1b[31m\u202eb" + "x" * 5000, by="mallory\n")
    found = read_silence(run)
    assert not {"\x1b", "\u202e", "\n"} & set(found.reason + found.by)
    assert len(found.reason) < 1100
    assert msgspec.json.decode(msgspec.json.encode(found), type=Silence) == found


def test_a_copy_of_a_run_is_not_silenced(tmp_path):
    """Its records came along, with the silence of another run."""
    run = new_run(tmp_path / "run")
    silence_run(run, silence_end("8h"), reason="", by="alice")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    copy = begin_run(str(tmp_path / "copy"))
    assert silence_now(run) is not None
    assert silence_now(copy) is read_silence(copy) is None
