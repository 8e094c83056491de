"""``ckptguard fleet``: what people see, and its exit codes."""

from __future__ import annotations

import json
import shutil

import pytest
from support.fleets import counts, ledger_of, make_fleet, step_of
from support.tiny_run import name_of


@pytest.fixture
def fleet(tmp_path, root):
    """Two runs of two saves each, one of which holds a NaN."""
    return make_fleet(tmp_path / "fleet", 2, 2, sick=[(1, 1)])


def test_it_says_the_cost_first_then_what_is_wrong(invoke, fleet):
    """The cost on stderr, the result on stdout."""
    done = invoke("fleet", "verify", fleet, "--workers", 2)
    assert done.exit_code == 3
    assert done.stderr.startswith("4 to do in 2 runs: ")
    assert "with 2 workers at 50 MB a second for each" in done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"bad        {fleet}/run1/{name_of(step_of(1))}")
    assert "[finite]" in lines[1]
    assert lines[-1].startswith("verify: 3 good, 1 bad (4 done now, ")
    again = invoke("fleet", "verify", fleet)
    assert (again.exit_code, again.stdout.splitlines()[0]) == (3, lines[0])
    assert "(0 done now, " in again.stdout


def test_a_dry_run_does_nothing(invoke, fleet):
    """It says the cost at the rate that is asked for."""
    done = invoke("fleet", "verify", fleet, "--dry-run", "--rate", "100MB")
    assert (done.exit_code, done.stdout) == (0, "")
    assert "at 95.4 MiB a second" in done.stderr
    assert not (fleet / "run0/_ckptguard").exists()


def test_a_dry_run_tells_what_is_bad_already(invoke, fleet):
    """A script that only asks for its exit code must not take that for good."""
    first = invoke("fleet", "verify", fleet)
    done = invoke("fleet", "verify", fleet, "--dry-run")
    assert done.exit_code == 3
    assert done.stdout.splitlines() == first.stdout.splitlines()[:-1]


def test_the_report_is_a_table(invoke, fleet):
    """With -q only the runs that need somebody."""
    invoke("fleet", "verify", fleet)
    done = invoke("fleet", "report", fleet)
    assert done.exit_code == 3
    head, *rows = done.stdout.splitlines()
    assert head.split()[:4] == ["RUN", "PROTECTED", "KNOWN", "GOOD"]
    assert [row.split()[:3] for row in rows] == [
        ["run0", "partly", name_of(step_of(1))],
        ["run1", "partly", name_of(step_of(0))],
    ]


def test_all_good_is_quiet(invoke, fleet):
    """-q prints nothing where nothing is wrong."""
    shutil.rmtree(fleet / "run1")
    done = invoke("fleet", "verify", fleet, "-q")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "")


def test_people_are_told_of_a_bad_save_once(invoke, fleet, tmp_path, monkeypatch):
    """By the hooks of the settings, from here: workers hold no address."""
    told = tmp_path / "told"
    monkeypatch.setenv("CKPTGUARD_ON_INCIDENT", json.dumps(["sh", "-c", f"cat >> {told}"]))
    for _ in range(2):
        assert invoke("fleet", "verify", fleet).exit_code == 3
    event = json.loads(told.read_text())
    assert (event["event"], event["cause"], event["checkpoint"]["path"]) == ("verdict", "bad", name_of(step_of(1)))


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (("verify", "nowhere"), 10, "there is no folder"),
        (("verify", "empty"), 10, "there is no run in empty"),
        (("verify", "fleet", "--engine", "celery"), 2, "there is no engine 'celery'"),
        (("report", "fleet", "--rate", "1MB"), 2, "--rate is not for report"),
        (("report", "fleet", "--engine", "processes"), 2, "--engine and --workers are not for report"),
        (("forget", "fleet"), 2, "forget"),
        (("scrub", "fleet", "--max-age", "soon"), 2, "soon"),
        (("replicate", "fleet"), 1, "name no replica"),
    ],
)
def test_what_cannot_be_done_is_a_sentence(invoke, fleet, words, code, sentence):
    """And an exit code."""
    (fleet.parent / "empty").mkdir()
    done = invoke("fleet", *words)
    assert (done.exit_code, sentence in done.stderr) == (code, True), done.stderr


def test_the_command_does_its_shard_alone(invoke, tmp_path, root):
    """Each run is verified once, its total is that of its shard, and runs that are added meanwhile have their own."""
    fleet = make_fleet(tmp_path / "fleet", 7, 2, sick=[(3, 1)])
    total = {"good": 0, "bad": 0}
    for number in range(1, 5):
        done = invoke("fleet", "verify", fleet, "--shard", f"{number}/4", "--json")
        document = json.loads(done.stdout)
        assert (document["shard"], document["left"]) == (f"{number}/4", 0)
        assert document["done"] == document["cost"]["checkpoints"] == sum(document["outcomes"].values())
        assert done.exit_code == (3 if document["outcomes"]["bad"] else 0)
        for outcome, count in counts(document).items():
            total[outcome] += count
        if number == 2:  # a run that is found later, and changes nothing of the others
            make_fleet(tmp_path / "more", 1, 2)
            (tmp_path / "more/run0").rename(fleet / "later")
    ran = {name.partition("/")[0] for name in ledger_of(fleet)} - {"later"}
    assert (ran, total["bad"]) == ({f"run{n}" for n in range(7)}, 1)
    assert total["good"] in (13, 15)
    assert len(ledger_of(fleet)) == total["good"] + total["bad"]


@pytest.mark.parametrize("shard", ["0/4", "5/4", "1", "1/0", "a/b", "-1/4", "1/4/2", "²/4", "1/9999999999"])
def test_a_shard_that_is_none_is_a_sentence(invoke, tmp_path, shard):
    """And nothing is done."""
    fleet = make_fleet(tmp_path / "fleet", 1, 1)
    done = invoke("fleet", "verify", fleet, "--shard", shard)
    assert (done.exit_code, "the shards of 8 are 1/8 to 8/8" in done.stderr) == (2, True), done.stderr
    assert ledger_of(fleet) == []
