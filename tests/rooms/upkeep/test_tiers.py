"""Each place of replicas has a rule of its own: it holds what the rule keeps, and always the newest good one."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from collections.abc import Iterable
from pathlib import Path
from unittest import mock

import click.testing
import pytest
from support.layouts import WRITERS
from support.records_on_disk import files_of
from support.tiny_run import TINY, cycle, delete, inline, name_of, poison, save
from support.views import look

from ckptguard.cli.entry import commands
from ckptguard.errors import SettingsError, StorageError
from ckptguard.records.run import open_run
from ckptguard.records.trash import read_trash
from ckptguard.replicas.replicate import Replica, replica_states, replicate
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.runs.run_view import RunView
from ckptguard.runs.work import Work
from ckptguard.upkeep.thin import thin
from ckptguard.upkeep.tiers import update_replica
from ckptguard.values.retention_policy import Policy
from ckptguard.values.settings import ReplicaPlace, Settings, environment_of, parse_settings, with_environment
from ckptguard.values.verdict import Outcome

NONE = TINY.changed(keep="none", trash_grace=0.0)
RULES = (
    {"keep_last": 1},
    {"keep_last": 3},
    {"keep_every": 50},
    {"keep_every": 30, "keep_last": 2},
    {},
)


def stays(steps: Iterable[int], rule: dict[str, int]) -> set[int]:
    """What a rule keeps, said in another way than the product does: the newest in any case."""
    newest_first = sorted(steps, reverse=True)
    if not rule:
        return set(newest_first)
    kept = set(newest_first[: max(1, rule.get("keep_last", 0))])
    if every := rule.get("keep_every"):
        for _, own in itertools.groupby(sorted(steps), key=lambda step: step // every):
            kept.add(next(own))
    return kept


def with_place(url: str, rule: dict[str, object], **more: object) -> Settings:
    """Settings with one place."""
    return NONE.changed(replicas=(ReplicaPlace(url=url, **rule),), **more)  # type: ignore[arg-type]


def held(url: str) -> set[int]:
    """The steps whose files lie in a place."""
    return {int(key.split("/")[0].removeprefix("model-")) for key in files_of(url) if key.startswith("model-")}


def rows(done: Replica, word: str) -> set[int]:
    """The steps of which that was done."""
    return {one.id.number or 0 for one in done.checkpoints if one.done == word}


def gone(done: Replica) -> set[int]:
    """The steps that were removed there."""
    return {one.checkpoint.id.number or 0 for one in (done.pruned.removed if done.pruned is not None else ())}


@pytest.mark.parametrize("rule", RULES, ids=json.dumps)
@pytest.mark.parametrize("seed", range(2))
def test_a_place_holds_what_its_rule_keeps(tmp_path: Path, rule: dict[str, int], seed: int) -> None:
    """Saves, bad ones, rotation in the run, and updates in any order. After each update the place holds what the rule
    keeps of the run's good ones and of its own, a dry run has said it, and the next update does nothing."""
    numbers, place, root = random.Random(seed), str(tmp_path / "place"), tmp_path / "run"
    settings, step, before = with_place(place, rule), 0, set[int]()
    good: list[int] = []
    for _ in range(8):
        for _ in range(numbers.randint(1, 4)):
            step += 10
            save(str(root), step, step)
            if numbers.random() < 0.2:
                poison(root / name_of(step) / "model.safetensors")
            else:
                good.append(step)
        for old in [old for old in good[:-2] if numbers.random() < 0.3]:
            delete(str(root), old)
            good.remove(old)
        cycle(open_run(str(root)), settings)
        if not good:
            continue
        view = RunView(open_run(str(root)), settings)
        union = before | set(good)
        planned = update_replica(view, place, dry_run=True)
        assert held(place) == before if before else not Path(place).exists()
        done = update_replica(view, place, work=Work(scanner=inline))
        assert done.trouble is None
        assert held(place) == stays(union, rule)
        assert (rows(planned, "would send"), gone(planned)) == (rows(done, "sent"), gone(done))
        assert max(held(place)) == max(union)
        again = update_replica(RunView(open_run(str(root)), settings), place, work=Work(scanner=inline))
        assert (rows(again, "sent"), gone(again), again.behind) == (set(), set(), 0)
        (state,) = replica_states(RunView(open_run(str(root)), settings))
        assert (state.behind, state.last_good) == (0, done.last_good)
        before = held(place)
    if before:  # the run is lost
        shutil.rmtree(root)
        assert find_known_good(open_run(place)).step == max(before)


def more_than_the_rule_keeps(folder: Path) -> tuple[Path, str, Settings]:
    """A run and a place that both have 10 and 20, and settings by which the place keeps the newest."""
    root, place = folder / "run", str(folder / "place")
    settings = with_place(place, {"keep_last": 1})
    for step in (10, 20):
        save(str(root), step, step)
    cycle(open_run(str(root)), settings)
    replicate(RunView(open_run(str(root)), NONE), place)
    return root, place, settings


def test_nothing_is_removed_while_something_is_to_be_sent(tmp_path: Path) -> None:
    """The disk of the newest is gone from the run's side: what the place has stays."""
    root, place, settings = more_than_the_rule_keeps(tmp_path)
    assert held(place) == {10, 20}
    save(str(root), 30, 30)
    cycle(open_run(str(root)), settings)
    data = bytearray((root / "model-30" / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (root / "model-30" / "model.safetensors").write_bytes(data)
    done = update_replica(RunView(open_run(str(root)), settings), place, work=Work(scanner=inline))
    assert rows(done, "damaged") == {30}
    assert held(place) >= {20}


def test_nothing_is_removed_while_nobody_knows_what_is_there(tmp_path: Path) -> None:
    """The records of the place cannot be listed again after the sending."""
    root, place, settings = more_than_the_rule_keeps(tmp_path)
    hidden = StorageError("it did not answer", key="")
    with mock.patch("ckptguard.replicas.replicate._current_verdict", side_effect=hidden):
        done = update_replica(RunView(open_run(str(root)), settings), place)
    assert (done.behind, done.trouble, done.pruned) == (None, None, None)
    assert held(place) == {10, 20}
    assert gone(update_replica(RunView(open_run(str(root)), settings), place)) == {10}


def test_what_a_place_removes_can_be_restored(tmp_path: Path) -> None:
    """It lies in the trash of the place for `trash_grace`."""
    root, place = tmp_path / "run", str(tmp_path / "place")
    settings = with_place(place, {"keep_last": 1}, trash_grace=1e6)
    for step in (10, 20):
        save(str(root), step, step)
        cycle(open_run(str(root)), settings)
        update_replica(RunView(open_run(str(root)), settings), place)
    assert held(place) == {20}
    assert [mark.path for mark in read_trash(open_run(place))] == ["model-10"]


@pytest.mark.parametrize("asks", ["no", "everywhere", "this place", "all but this place"])
@pytest.mark.parametrize("layout", ["trainer", "lightning", "dcp"])
def test_a_replica_is_thinned_only_if_its_place_says_so(tmp_path: Path, layout: str, asks: str) -> None:
    """`replica_thin` for all places, `thin` for one: whether files went, or were written anew without their state. The
    newest one stays whole, all of it stays good, and nothing is sent again."""
    root, place = tmp_path / "run", str(tmp_path / "place")
    thins = {"no": (False, None), "everywhere": (True, None), "this place": (False, True)}.get(asks, (True, False))
    settings = NONE.changed(replicas=(ReplicaPlace(url=place, thin=thins[1]),), replica_thin=thins[0], trash_grace=1e6)
    paths = [WRITERS[layout](root, step, step) for step in (100, 200, 300)]
    cycle(open_run(str(root)), settings)
    update_replica(RunView(open_run(str(root)), settings), place)
    whole = in_place(place)
    assert whole == in_place(root)
    assert thin(RunView(open_run(str(root)), settings), Policy(thin_after=1, keep_good=1))[1] == ()
    thinned = in_place(root)
    assert thinned != whole
    done = update_replica(RunView(open_run(str(root)), settings), place)
    assert (done.trouble, done.behind, rows(done, "sent")) == (None, 0, set())
    if asks in ("everywhere", "this place"):
        assert in_place(place) == thinned
        assert done.pruned is not None
        assert {one.path for one in done.pruned.thinned} == set(paths[:2])
    else:
        assert in_place(place) == whole
        assert done.pruned is None
    history = look(open_run(place)).history
    verdicts = [verdict for name in history.names for verdict in history.current_verdicts(name).values()]
    assert {verdict.outcome for verdict in verdicts} == {Outcome.GOOD}
    assert find_known_good(open_run(place)).step == 300
    again = update_replica(RunView(open_run(str(root)), settings), place)
    assert (again.behind, rows(again, "sent"), gone(again)) == (0, set(), set())
    assert again.pruned is None or not again.pruned.thinned


def in_place(root: Path | str) -> dict[str, bytes]:
    """The files of a run, or of a place, without the records."""
    return {key: data for key, data in files_of(str(root)).items() if not key.startswith("_ckptguard/")}


TOML = """
replicas = [
    "/mnt/all/{run}",
    {url = "/nvme/{run}", keep_last = 2},
    {url = "s3://cold/{run}", keep_every = 10000, thin = true},
]
"""


def test_a_rule_is_read_shown_and_handed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From TOML, the environment, and to other processes; `config` shows it with the run's name."""
    settings = parse_settings(TOML, "ckptguard.toml")
    assert [(place.keep_last, place.keep_every, place.thin) for place in settings.places] == [
        (None, None, None),
        (2, None, None),
        (None, 10000, True),
    ]
    assert with_environment(Settings(), environment_of(settings, {})) == settings
    save(str(tmp_path / "exp1"), 10, 10)
    (tmp_path / "ckptguard.toml").write_text(TOML)
    monkeypatch.chdir(tmp_path)
    shown = click.testing.CliRunner().invoke(commands, ["config", "exp1", "--json"], prog_name="ckptguard")
    values = {one["name"]: one["value"] for one in json.loads(shown.output)["settings"]}
    assert values["replicas"] == [
        "/mnt/all/exp1",
        {"url": "/nvme/exp1", "keep_last": 2},
        {"url": "s3://cold/exp1", "keep_every": 10000, "thin": True},
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[{url = "/a", keep_last = 0}]', "keep_last must be at least 1"),
        ('[{url = "/a", keep_best = ["loss"]}]', "METRIC"),
        ('[{url = "/a", keep_within = "soon"}]', "time span"),
        ("[{keep_last = 2}]", "replicas must be"),
        ('[{url = "/a", keep_lats = 2}]', "replicas must be"),
        ('[{url = "/{name}", keep_last = 2}]', "not a path or URL"),
        ("[3]", "replicas must be"),
    ],
)
def test_an_impossible_rule_is_refused(text: str, said: str) -> None:
    """With a sentence that names it."""
    with pytest.raises(SettingsError, match="replicas") as caught:
        parse_settings(f"replicas = {text}", "ckptguard.toml")
    assert said in caught.value.message
