"""prune, pin and unpin, and what list says of copies."""

import os

import click.testing
import pytest
from support.json_documents import EXAMPLES, ordered, shape
from support.runs import QUICK, write_torch
from support.views import look

from ckptguard.cli.entry import commands
from ckptguard.upkeep.reconcile import PassNotes, reconcile


def steps(documents):
    """The steps of a list of a document."""
    return [one["step"] for one in documents]


@pytest.fixture
def four(verified, invoke):
    """Four verified checkpoints."""
    write_torch(verified, 400, seed=400)
    assert invoke("verify", verified).exit_code == 0
    return verified


def test_flags_say_what_stays(document, four):
    """A dry run and the real one agree; what went is in the trash, and restore finds it there."""
    code, planned = document("prune", four, "--keep-last", "2", "--dry-run")
    assert (code, steps(planned["removed"])) == (0, [100, 200])
    assert len(list(four.glob("*.pt"))) == 4
    code, done = document("prune", four, "--keep-last", "2")
    assert (code, done["removed"], done["kept"]) == (0, planned["removed"], planned["kept"])
    assert steps(done["in_trash"]) == [100, 200]
    assert sorted(p.name for p in four.glob("*.pt")) == ["net-300.pt", "net-400.pt"]
    code, restored = document("restore", four, "--step", "100", "--to", "out")
    assert (code, restored["outcome"]) == (0, "good")
    assert [c["trashed"] for c in document("list", four)[1]["checkpoints"]] == [True, True, False, False]


def test_settings_say_what_stays_and_flags_come_first(document, four, tmp_path):
    """Rules come from ckptguard.toml too."""
    (tmp_path / "ckptguard.toml").write_text("keep_last = 3\nkeep_good = 1\n")
    assert steps(document("prune", four, "--dry-run")[1]["removed"]) == [100]
    assert steps(document("prune", four, "--dry-run", "--keep-last", "1")[1]["removed"]) == [100, 200, 300]


def test_without_a_rule_nothing_is_removed(invoke, four):
    """It says so, and all stays."""
    result = invoke("prune", four)
    assert result.exit_code == 0
    assert "nothing is removed" in result.stderr
    assert "moved 0 to the trash" in result.stdout
    assert len(list(four.glob("*.pt"))) == 4


def test_what_changed_is_called_so_everywhere(document, invoke, four):
    """One word for one state: prune and list call it changed, and nothing older goes."""
    with (four / "net-300.pt").open("ab") as file:
        file.write(b"more")
    pruned = invoke("prune", four, "--keep-last", "1", "--dry-run").stdout
    [line] = [one for one in pruned.splitlines() if one.startswith("net-300.pt")]
    assert "changed" in line
    assert "pending" not in pruned
    assert "net-300.pt is newer and has changed since its verdict" in pruned
    assert "changed" in next(one for one in invoke("list", four).stdout.splitlines() if one.startswith("net-300.pt"))
    kept = {one["path"]: one for one in document("prune", four, "--keep-last", "1", "--dry-run")[1]["kept"]}
    assert (kept["net-300.pt"]["outcome"], kept["net-300.pt"]["changed"]) == ("pending", True)
    assert kept["net-400.pt"]["changed"] is False


def test_a_mistyped_metric_is_told(invoke, four):
    """What no checkpoint has can keep nothing, and takes nothing away."""
    result = invoke("prune", four, "--keep-best", "los:min")
    assert (result.exit_code, "moved 0 to the trash" in result.stdout) == (0, True)
    assert 'no good checkpoint has the metric "los"' in result.stderr


@pytest.mark.parametrize(
    "flags",
    [
        ("--keep-last", "0"),
        ("--keep-every", "x"),
        ("--keep-within", "soon"),
        ("--keep-best", "loss"),
        ("--keep-within", "0"),
    ],
)
def test_rules_that_make_no_sense_are_wrong_usage(invoke, four, flags):
    """One sentence, exit code 2, and nothing removed."""
    assert invoke("prune", four, *flags).exit_code == 2
    assert len(list(four.glob("*.pt"))) == 4


def test_what_cannot_be_read_is_said_and_removes_nothing(invoke, four):
    """A damaged record ends it with exit code 1."""
    [entry] = (four / "_ckptguard" / "ledger").glob("*/000000000400.1.*.good.json")
    entry.write_bytes(b"{}")
    result = invoke("prune", four, "--keep-last", "2")
    assert result.exit_code == 1
    assert "cannot be read" in result.stderr
    assert len(list(four.glob("*.pt"))) == 4


def test_a_pin_holds_until_it_is_lifted(invoke, document, four):
    """It is shown with its note; other people's notes are escaped."""
    code, pinned = document("pin", four / "net-100.pt", "--note", "paper\x1b[31m", "--until", "30d")
    assert (code, pinned["pins"][0]["id"]) == (0, "100.1")
    assert pinned["pins"][0]["until"] > pinned["pins"][0]["since"]
    assert invoke("pin", four / "net-100.pt").exit_code == 0
    shown = invoke("prune", four, "--keep-last", "2", "--dry-run").stdout
    assert "paper\\u001b[31m" in shown
    assert steps(document("prune", four, "--keep-last", "2")[1]["removed"]) == [200]
    assert document("list", four)[1]["checkpoints"][0]["pins"]
    code, released = document("unpin", four / "net-100.pt")
    assert (code, len(released["pins"])) == (0, 2)
    assert invoke("unpin", four / "net-100.pt").exit_code == 10
    assert steps(document("prune", four, "--keep-last", "2")[1]["removed"]) == [100]


@pytest.mark.parametrize("until", ["yesterday", "2020-01-01", "-1d", "nan", "", "99999999w"])
def test_a_time_that_makes_no_sense_is_wrong_usage(invoke, four, until):
    """A pin that ends before it begins, or at no time."""
    assert invoke("pin", four / "net-100.pt", "--until", until).exit_code == 2


def test_only_checkpoints_of_a_run_can_be_pinned(invoke, root, tmp_path):
    """A stray file has no records to hold a pin."""
    write_torch(tmp_path / "stray", 1, seed=1)
    assert invoke("pin", tmp_path / "stray" / "net-1.pt").exit_code == 10
    assert invoke("pin", tmp_path / "absent").exit_code == 10


def test_list_says_what_copies_cost(invoke, document, three):
    """A link costs nothing while the trainer's file lives, and its bytes when it is gone; a copy always costs them."""
    reconcile(look(str(three), QUICK.changed(keep="link")), PassNotes())
    found = {c["step"]: c for c in document("list", three)[1]["checkpoints"]}
    assert [found[s]["kept_how"] for s in (200, 300)] in (["link"] * 2, ["reflink"] * 2)
    if found[300]["kept_how"] == "reflink":
        assert found[300]["kept_bytes"] is None
        return
    assert [found[s]["kept_bytes"] for s in (100, 200, 300)] == [None, 0, 0]
    size = os.stat(three / "net-300.pt").st_blocks * 512
    (three / "net-300.pt").unlink()
    found = {c["step"]: c for c in document("list", three)[1]["checkpoints"]}
    assert (found[300]["kept_bytes"], found[200]["kept_bytes"]) == (size, 0)
    shown = invoke("list", three).stdout.splitlines()
    assert shown[0].split() == ["PATH", "OUTCOME", "WHERE", "SIZE", "COPY", "REASON"]
    assert "run+kept" in shown[2]
    assert " 0.0 KiB " in shown[2]


def test_clean_asks_says_sizes_and_removes_only_then(invoke, document, four, monkeypatch):
    """Where nobody can be asked it is wrong usage. "no" removes nothing, and --yes asks nothing."""
    reconcile(look(four, QUICK.changed(keep="copy")), PassNotes())
    before = sorted(four.rglob("*"))
    for options in ((), ("--json",)):
        refused = invoke("clean", four, *options)
        assert (refused.exit_code, "--yes" in refused.stderr + refused.stdout) == (2, True)
    code, planned = document("clean", four, "--dry-run")
    assert (code, planned["dry_run"], planned["stays"]) == (0, True, [])
    monkeypatch.setattr("ckptguard.cli.commands.clean.can_ask", lambda: True)
    asked = click.testing.CliRunner().invoke(commands, ["clean", str(four)], input="n\n")
    assert asked.exit_code == 0
    assert "protected copies" in asked.stdout
    assert "KiB  is removed" in asked.stdout
    assert "nothing was removed" in asked.stderr
    assert sorted(four.rglob("*")) == before
    assert ordered(shape(planned)) == ordered(shape(EXAMPLES["clean"] | {"stays": []}))
    asked = click.testing.CliRunner().invoke(commands, ["clean", str(four), "--everything"], input="n\n")
    assert "Remove it?" in asked.stderr  # all of it is in place, too
    (four / "net-400.pt").unlink()
    asked = click.testing.CliRunner().invoke(commands, ["clean", str(four), "--everything"], input="n\n")
    assert ("1 of these files exist nowhere else" in asked.stdout, "also what exists nowhere" in asked.stderr) == (
        True,
        True,
    )
    before.remove(four / "net-400.pt")
    done = invoke("clean", four, "--yes", "--everything")
    assert (done.exit_code, (four / "_ckptguard").exists()) == (0, False)
    assert f"files of {four}" in done.stdout
    assert sorted(four.rglob("*")) == [path for path in before if "_ckptguard" not in path.parts]
    assert invoke("clean", four, "--yes").exit_code == 10


def test_clean_says_which_saves_need_their_records(invoke, four):
    """Those of a guard, where the records go; of a trainer's own saves there is nothing to say."""
    assert "TrainingGuard" not in invoke("clean", four, "--dry-run").stdout
    (four / "step-000000500").mkdir()
    (four / "step-000000500" / "state.json").write_text("{}")
    assert "saves of a TrainingGuard count as incomplete" in invoke("clean", four, "--dry-run").stdout


def test_clean_removes_the_links_of_this_user(invoke, document, four, monkeypatch, tmp_path):
    """With --cache alone; a file that is not ours stays."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    reconcile(look(four, QUICK.changed(keep="copy")), PassNotes())
    (four / "net-400.pt").unlink()
    path = invoke("known-good", four).stdout.strip()
    assert path.startswith(str(tmp_path / "cache"))
    (tmp_path / "cache" / "mine.txt").write_text("mine")
    assert document("clean", four, "--yes")[1]["cached_links"] == 0
    assert os.path.exists(path)
    assert document("clean", four, "--dry-run", "--cache")[1]["cached_links"] >= 1
    assert document("clean", four, "--yes", "--cache")[1]["cached_links"] >= 1
    assert os.listdir(tmp_path / "cache") == ["mine.txt"]
    assert invoke("known-good", four).stdout.strip() == path
