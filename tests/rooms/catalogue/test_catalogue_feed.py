"""What a pass tells the catalogue: no request more for an unchanged run, and what `status` would say."""

from types import SimpleNamespace

import msgspec
import pytest
from ckptguard_daemon.catalogue_feed import CatalogueFeed
from support.counting_storage import counted
from support.tiny_run import TINY, WEIGHTS, delete, forget, inline, name_of, poison, rot, save

from ckptguard.catalogue.catalogue import Catalogue
from ckptguard.engine.watched_run import Passed
from ckptguard.errors import ObjectMissingError, StorageError
from ckptguard.inspect.status import status
from ckptguard.records.incidents import open_incident, update_incident
from ckptguard.records.run import open_run
from ckptguard.recover.roll_back import GoBack, roll_back
from ckptguard.replicas.replicate import Replica
from ckptguard.runs.run_view import RunView
from ckptguard.runs.work import Work
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.ids import name_of_run


class Guarded:
    """A run with a feed, and the requests of its last pass and its last note."""

    def __init__(self, url, folder, settings=TINY):
        self.url, self.settings = url, settings
        self.folder = folder
        self.replicas = ()
        self.restart()

    def restart(self):
        """A new process."""
        self.run, self.requests = counted(open_run(self.url, self.settings, must_exist=False))
        self.notes, self.feed = PassNotes(), CatalogueFeed(Catalogue(str(self.folder)))

    def make_pass(self):
        """One pass. Returns the requests of the note alone."""
        view = RunView(self.run, self.settings)
        done = reconcile(view, self.notes, work=Work(scanner=inline), assume_quiet=True)
        self.requests.clear()
        wrote = bool(done.checked or done.pruned)
        self.feed.note(view, Passed(notes=self.notes, replicas=self.replicas, wrote=wrote))
        return self.requests.total()

    @property
    def summary(self):
        """What the feed says of it, but for the room on the disk, which others use, too."""
        known = {"run_id": self.run.run_id, "url": self.url, "name": name_of_run(self.url), "shared": None}
        found = self.feed.summary(SimpleNamespace(**known, state="guarded", trouble=None, settings=self.settings))
        return msgspec.structs.replace(found, free=None)

    @property
    def noted(self):
        """What the catalogue holds of it."""
        return self.feed.catalogue.noted(self.run.run_id)

    def events(self):
        """The kinds and causes of its events, in order."""
        return [(e.event.kind, e.event.cause) for e in self.noted.events]


@pytest.fixture(params=["local", "memory"])
def guarded(request, tmp_path, tmp_path_factory):
    """A run of three good checkpoints, noted."""
    (tmp_path / "run").mkdir()
    url = str(tmp_path / "run") if request.param == "local" else f"memory://feed-{tmp_path.name}"
    for step in (1, 2, 3):
        save(url, step, step)
    found = Guarded(url, tmp_path_factory.mktemp("private"))
    found.make_pass()
    yield found
    forget(url)


def test_an_unchanged_run_costs_nothing(guarded):
    """Neither pass after pass nor after a restart is anything asked of its storage."""
    guarded.make_pass()
    assert [guarded.make_pass() for _ in range(3)] == [0, 0, 0]
    guarded.restart()
    assert guarded.make_pass() == 0
    assert guarded.summary.checkpoints == {"good": 3}


def test_a_new_save_costs_as_much_whatever_is_there(guarded):
    """Only the records of what is new are read."""
    costs = []
    for step in range(4, 12):
        save(guarded.url, step, step)
        costs.append(guarded.make_pass())
    assert max(costs) <= costs[1] + 2


def test_it_says_what_status_says(guarded):
    """Protection and known-good are those of `status`, through verdicts, damage, loss and a kept copy."""

    def same():
        guarded.make_pass()
        told = status(RunView(open_run(guarded.url), guarded.settings), supervised=True)
        summary = guarded.summary
        if told.summary.state != "ended":  # of such a run a daemon notes nothing, and says it itself
            assert (summary.protected, summary.explanation) == (told.protected, told.explanation)
        assert summary.known_good_step == (told.known_good.step if told.known_good else None)
        counts = {outcome: count for outcome, count in told.outcomes.items() if count}
        assert summary.checkpoints == counts

    same()
    rot(guarded.url, f"{name_of(3)}/{WEIGHTS}")
    guarded.notes.samples.clear()
    same()
    delete(guarded.url, 3)
    same()
    for step in (1, 2):
        delete(guarded.url, step)
    same()
    save(guarded.url, 9, 9)
    same()


def test_what_happened_is_told_in_order(guarded):
    """Verdicts, incidents, rollbacks, losses and replicas in trouble become events, each once."""
    start = guarded.events()
    assert sorted(start) == [("verdict", "good")] * 3
    incident = open_incident(guarded.run, step=7, cause="numeric", reason="NaN", evidence={}, source="guard")
    guarded.make_pass()
    update_incident(guarded.run, incident, state="closed", action="rolled back", known_good="3.1")
    guarded.make_pass()
    delete(guarded.url, 1)
    guarded.make_pass()
    for trouble in ("no route", "no route", None):
        guarded.replicas = (Replica(url="s3://other", behind=1, last_good=None, trouble=trouble),)
        guarded.make_pass()
    assert guarded.events()[3:] == [
        ("incident", "numeric"),
        ("rollback", "numeric"),
        ("gone", "good"),
        ("replica", "trouble"),
        ("replica", "recovered"),
    ]
    assert (guarded.summary.incidents, guarded.summary.rollbacks) == ({"numeric": 1}, {"numeric": 1})
    assert (guarded.summary.steps_saved, guarded.summary.replicas_behind) == (3, 1)


def test_what_was_taken_away_says_by_whom(tmp_path, tmp_path_factory):
    """Retention, a rollback and a trainer that rotates are told apart."""
    (tmp_path / "run").mkdir()
    url = str(tmp_path / "run")
    for step in (1, 2, 3, 4):
        save(url, step, step)
    guarded = Guarded(url, tmp_path_factory.mktemp("private"))
    guarded.make_pass()
    guarded.settings = TINY.changed(keep_last=3)
    guarded.notes.prune_at = 0.0
    save(url, 5, 5)
    guarded.make_pass()
    roll_back(RunView(guarded.run, guarded.settings), GoBack(reason="loss", before_step=5, check_writing=False))
    guarded.make_pass()
    delete(url, 4)
    guarded.make_pass()
    found = [e.event for e in guarded.noted.events]
    moved = [(event.kind, event.step) for event in found if event.kind not in ("verdict", "incident")]
    assert sorted(moved) == [("gone", 4), ("prune", 1), ("prune", 2), ("quarantine", 5)]


def test_a_bad_one_is_found_by_name_and_reason(tmp_path, tmp_path_factory):
    """Also if the catalogue is made anew. Names as markup stay text, and control characters are escaped."""
    root = tmp_path / "run"
    root.mkdir()
    for step in (1, 2):
        save(str(root), step, step)
    poison(root / name_of(2) / WEIGHTS)
    odd = root / "<img src=x>\u202e-5"
    (root / name_of(2)).rename(odd)
    for _ in range(2):
        guarded = Guarded(str(root), tmp_path_factory.mktemp("private"))
        guarded.make_pass()
        [event] = [e.event for e in guarded.noted.events if e.event.cause == "bad"]
        assert "NaN" in event.text
        line = guarded.noted
        [bad] = [g for g in line.generations.values() if g.outcome == "bad"]
        assert bad.path == "<img src=x>\\u202e-5"
        assert event.about == bad.name
        assert {g.outcome for g in line.generations.values()} == {"good", "bad"}


def test_a_name_in_no_encoding_is_noted(tmp_path, tmp_path_factory):
    """A run whose folder's name is not UTF-8 has its row."""
    root = tmp_path / "run\udcff"
    root.mkdir()
    save(str(root), 1, 1)
    guarded = Guarded(str(root), tmp_path_factory.mktemp("private"))
    guarded.make_pass()
    assert guarded.summary.checkpoints == {"good": 1}
    assert guarded.feed.catalogue.summary(guarded.run.run_id).name == "run\\udcff"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (StorageError("no route", key=""), [0, 1, 1]),  # what is missing may belong to a run that is being removed
        (ObjectMissingError("there is no such file", key=""), [0, 1, 1]),
        (KeyError("a fault of ours"), [1, 1, 1]),
    ],
)
def test_a_storage_that_fails_fails_no_pass(guarded, monkeypatch, error, told):
    """The note is left out, told once if it lasts, and made later."""
    save(guarded.url, 4, 4)

    def broken(*args, **kwargs):
        raise error

    logged = []
    monkeypatch.setattr("ckptguard_daemon.catalogue_feed.log", lambda event, **fields: logged.append(event))
    view = RunView(guarded.run, TINY)
    done = reconcile(view, guarded.notes, work=Work(scanner=inline), assume_quiet=True)
    assert done.checked
    for count in told:
        with monkeypatch.context() as patched:
            patched.setattr("ckptguard_daemon.catalogue_feed.record_names", broken)
            guarded.feed.note(view, Passed(notes=guarded.notes, wrote=True))
        assert logged == ["not_catalogued"] * count
    assert guarded.summary.checkpoints == {"good": 3}
    guarded.make_pass()
    assert guarded.summary.checkpoints == {"good": 4}


def test_a_run_that_goes_during_a_pass_stays_known(tmp_path, tmp_path_factory):
    """Nothing of it is taken for removed: it comes back when a mount does."""
    run, aside = tmp_path / "run", tmp_path / "aside"
    run.mkdir()
    for step in (1, 2):
        save(str(run), step, step)
    guarded = Guarded(str(run), tmp_path_factory.mktemp("private"))
    guarded.make_pass()
    before = guarded.summary, guarded.events()
    save(str(run), 3, 3)
    view = RunView(guarded.run, TINY)
    reconcile(view, guarded.notes, work=Work(scanner=inline), assume_quiet=True)
    run.rename(aside)
    guarded.feed.note(view, Passed(notes=guarded.notes, wrote=True))
    assert (guarded.summary, guarded.events()) == before
    aside.rename(run)
    guarded.make_pass()
    assert guarded.summary.checkpoints == {"good": 3}


def test_many_are_read_over_several_passes(tmp_path, tmp_path_factory, monkeypatch):
    """A long history is read part by part, the newest first. Nothing that was not read is called good."""
    monkeypatch.setattr("ckptguard.catalogue.observe._MOST_READ", 4)
    (tmp_path / "run").mkdir()
    url = str(tmp_path / "run")
    for step in range(1, 11):
        save(url, step, step)
    guarded, found = Guarded(url, tmp_path_factory.mktemp("private")), []
    for _ in range(4):
        guarded.make_pass()
        found.append(guarded.summary.checkpoints.get("good", 0))
        assert guarded.summary.known_good_step == 10
    assert found == [4, 8, 10, 10]
    assert guarded.make_pass() == 0


def test_without_a_file_the_facts_are_the_same(guarded, tmp_path_factory):
    """A catalogue in memory has the same rows, and reads as little."""
    alone = Guarded(guarded.url, tmp_path_factory.mktemp("none"))
    alone.feed = CatalogueFeed()
    alone.make_pass()
    alone.make_pass()
    assert alone.make_pass() == 0
    guarded.make_pass()
    assert alone.summary == guarded.summary
