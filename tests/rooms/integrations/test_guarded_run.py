"""A guarded run is opened by all ranks, or by none, and for the same reason."""

import threading

import pytest
from support.runs import QUICK

from ckptguard.errors import RecordsError, SettingsError
from ckptguard.integrations import guarded_run
from ckptguard.integrations.guarded_run import GuardedRun, open_guarded


class Threads:
    """Two ranks that are threads of this process."""

    size = 2

    def __init__(self):
        self._here = threading.local()
        self._barrier = threading.Barrier(2, timeout=100)
        self._said = [None, None]

    @property
    def rank(self):
        return self._here.rank

    def any(self, mine):
        return any(self.gather(mine))

    def gather(self, mine):
        self._barrier.wait()
        self._said[self.rank] = mine
        self._barrier.wait()
        return list(self._said)

    def tell(self, value):
        return self.gather(value)[0]

    def run(self, work):
        """What `work` returned or raised on each rank."""
        found = [None, None]

        def one(rank):
            self._here.rank = rank
            try:
                found[rank] = work(rank)
            except Exception as error:
                found[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return found


@pytest.fixture
def ranks(monkeypatch):
    """Ranks that every GuardedRun of this test has."""
    ranks = Threads()
    monkeypatch.setattr(guarded_run, "ranks_of_training", lambda timeout: ranks)
    return ranks


def opened(url, **arguments):
    """Open it without a daemon."""
    return open_guarded(str(url), series="checkpoint-#", daemon="off", settings=QUICK, **arguments)


@pytest.mark.parametrize("sick_rank", [0, 1])
def test_a_wrong_setting_ends_all_ranks_alike(tmp_path, ranks, monkeypatch, sick_rank):
    """Whichever rank has it: the same error with the same words, and nobody trains on unguarded."""
    load = guarded_run.given_settings

    def loads(*arguments):
        if ranks.rank == sick_rank:
            raise SettingsError("settle must be a number", hint="settle = 5")
        return load(*arguments)

    monkeypatch.setattr(guarded_run, "given_settings", loads)
    found = ranks.run(lambda rank: open_guarded(str(tmp_path), series="checkpoint-#", daemon="off"))
    assert [(type(e), e.message, e.hint) for e in found] == [
        (SettingsError, "settle must be a number", "settle = 5")
    ] * 2


def test_a_run_that_only_rank_0_finds_wrong_ends_all_alike(tmp_path, ranks, monkeypatch):
    """Rank 0 alone opens it."""

    def refuses(*arguments, **named):
        raise SettingsError("the run lies where no run can lie")

    monkeypatch.setattr(guarded_run, "open_run", refuses)
    found = ranks.run(lambda rank: opened(tmp_path))
    assert {(type(e), e.message) for e in found} == {(SettingsError, "the run lies where no run can lie")}


def test_a_run_that_cannot_be_opened_is_left_alone_by_all(tmp_path, ranks, monkeypatch, caplog):
    """Trouble with storage is no wrong setting: training goes on, unguarded on every rank."""

    def fails(*arguments, **named):
        raise RecordsError("the records are of a newer version")

    monkeypatch.setattr(guarded_run, "open_run", fails)
    assert ranks.run(lambda rank: opened(tmp_path)) == [None, None]
    assert caplog.text.count("is not guarded") == 2


def test_a_run_is_opened_by_all(tmp_path, ranks):
    """Rank 0 has the run, and all have the settings."""
    found = ranks.run(lambda rank: opened(tmp_path))
    assert all(isinstance(one, GuardedRun) and one.settings == QUICK for one in found)
