"""What sending asks of both storages: each side is listed once, and a checkpoint costs the same among many others."""

import pytest
from support.counting_storage import counted
from support.tiny_files import content
from support.views import look

from ckptguard.records.run import open_run
from ckptguard.replicas import replicate as module
from ckptguard.replicas.replicate import replicate
from ckptguard.replicas.start_run import start_run
from ckptguard.runs.run_view import RunView
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.settings import Settings

SETTINGS = Settings(settle=0.0, scan_interval=1.0, keep="none")


def good_run(root, count):
    """A run of so many good checkpoints."""
    for step in range(1, count + 1):
        folder = root / f"model-{step}"
        folder.mkdir(parents=True)
        for name, data in content(step).items():
            (folder / name).write_bytes(data)
    run = open_run(str(root))
    reconcile(RunView(run, SETTINGS), PassNotes(), assume_quiet=True)
    return run


@pytest.fixture
def there(monkeypatch):
    """What is asked of each replica that is opened."""
    asked = []

    def opened(*args, **kwargs):
        replica, requests = counted(open_run(*args, **kwargs))
        asked.append(requests)
        return replica

    monkeypatch.setattr(module, "open_run", opened)
    return asked


def cost_of_sending(tmp_path, count, there):
    """Requests here and there for each of so many checkpoints; each side's files are listed once at most."""
    run, here = counted(good_run(tmp_path / f"run-{count}", count))
    done = replicate(RunView(run, SETTINGS), str(tmp_path / f"replica-{count}"))
    assert [one.done for one in done.checkpoints] == ["sent"] * count
    assert (here["run.list"], there[-1]["run.list"]) == (0, 1)
    return (here.total() + there[-1].total()) / count


def test_a_checkpoint_costs_the_same_among_many(tmp_path, there):
    """Of 40 no more than of 10."""
    few, many = (cost_of_sending(tmp_path, count, there) for count in (10, 40))
    assert many <= few


def test_nothing_is_listed_again_for_what_is_there(tmp_path, there):
    """A second replication lists as often among 40 as among 10."""
    lists = []
    for count in (10, 40):
        run, here = counted(good_run(tmp_path / f"run-{count}", count))
        place = str(tmp_path / f"replica-{count}")
        replicate(RunView(run, SETTINGS), place)
        here.clear()
        replicate(RunView(run, SETTINGS), place)
        lists.append(
            [(asked["run.list"], asked["records.list"], asked["records.names"]) for asked in (here, there[-1])]
        )
    assert lists[0] == lists[1]


def test_starting_from_a_replica_lists_it_never(tmp_path):
    """What may be taken, its records say."""
    replicas = []
    for count in (10, 40):
        place = str(tmp_path / f"replica-{count}")
        replicate(look(good_run(tmp_path / f"run-{count}", count)), place)
        replica, requests = counted(open_run(place))
        start_run(look(replica), str(tmp_path / f"new-{count}"), SETTINGS)
        assert requests["run.list"] == 0
        replicas.append((requests["records.list"], requests["records.names"], requests["run.open"]))
    assert replicas[0] == replicas[1]
