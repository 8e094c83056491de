"""The JSON documents: what json.md shows is what the commands print."""

import json

import pytest
import torch
from support.faults import flip
from support.json_documents import EXAMPLES, ordered, shape
from support.plugins import plant
from support.runs import QUICK, state_dict, write_torch
from support.views import look

from ckptguard.cli.entry import COMMANDS
from ckptguard.documents.build import plain
from ckptguard.records.audit import begin_action, end_action
from ckptguard.records.daemon_record import DaemonRecord, write_daemon_record
from ckptguard.records.incidents import list_incidents, open_incident, update_incident
from ckptguard.records.run import open_run
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.incident import Details, Resumed, Sample, Training


@pytest.fixture
def eventful(three):
    """A guarded run with kept copies, a poisoned newest save, an incident and a daemon's record."""
    view = look(str(three), QUICK.changed(keep="copy"))
    run = view.run
    reconcile(view, PassNotes())
    state = state_dict(4)
    state["embed.weight"][0, 0] = float("inf")
    torch.save(state, three / "net-400.pt")
    open_incident(run, step=400, cause="numeric", reason="loss", evidence={"loss": float("nan")}, source="guard")
    write_daemon_record(run, DaemonRecord(address="/x", host="h", boot_id="b", pid=1, started_at="t"))
    return three


def test_every_command_has_its_example():
    """Each command with --json is in json.md once."""
    assert set(EXAMPLES) == set(COMMANDS) - {"completion", "dashboard", "supervise"}


@pytest.mark.parametrize(
    "arguments",
    [
        ("verify", "--step", "400"),
        ("known-good",),
        ("list",),
        ("config",),
        ("doctor",),
        ("rollback", "--dry-run"),
        ("gate",),
        ("restore", "--to", "out"),
        ("replicate", "--to", "elsewhere"),
        ("accept", "--step", "200"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_documents_are_as_shown(document, invoke, eventful, arguments, plugins):
    """A real document has the example's keys, in the example's order, all the way down."""
    plant(plugins, [("formats", "msgpack.v1", "read")], "")
    if arguments[0] in ("rollback", "gate"):
        (eventful / "last.pt").write_bytes((eventful / "net-400.pt").read_bytes())
        (eventful / "latest").write_text("net-400.pt")
        invoke("verify", eventful)
    _, found = document(arguments[0], eventful, *arguments[1:])
    example = shape(EXAMPLES[arguments[0]])
    if arguments[0] == "accept":  # findings are as in verify, and this checkpoint has some
        example["checkpoint"]["findings"] = shape(found["checkpoint"]["findings"])
    assert ordered(shape(found)) == ordered(example)


def test_documents_of_one_checkpoint_are_as_shown(document, invoke, eventful):
    """show and reseal print what json.md shows."""
    invoke("verify", eventful)
    for name in ("show", "reseal"):
        _, found = document(name, eventful / "net-200.pt")
        example = shape(EXAMPLES[name])
        place = found["verdict"] if name == "show" else found["checkpoint"]
        example["verdict" if name == "show" else "checkpoint"]["findings"] = shape(place["findings"])
        assert ordered(shape(found)) == ordered(example)


def test_documents_of_replicas_are_as_shown(document, eventful, tmp_path, monkeypatch):
    """status with a replica, and a restore that starts a run, print what json.md shows."""
    place = str(tmp_path / "elsewhere")
    document("replicate", eventful, "--to", place)
    monkeypatch.setenv("CKPTGUARD_REPLICAS", place)
    _, found = document("status", eventful)
    found["room"] = found["room"] or EXAMPLES["status"]["room"]  # null while there is room for all copies
    found["at_risk"] = found["at_risk"] or EXAMPLES["status"]["at_risk"]  # null once training is silent for a while
    assert ordered(shape(found)) == ordered(shape(EXAMPLES["status"]))
    assert found["replicas"] == [{"url": place, "behind": 0, "last_good": "300.1", "trouble": None}]
    _, found = document("restore", place, "--as-run", tmp_path / "new")
    assert ordered(shape(found)) == ordered(shape(EXAMPLES["restore"]))
    assert found["path"] == str(tmp_path / "new" / "net-300.pt")


def test_documents_of_a_fleet_are_as_shown(document, eventful, tmp_path):
    """Each verb prints what json.md shows; only a report has rows."""
    (tmp_path / "fleet").mkdir()
    eventful.rename(tmp_path / "fleet/run")
    example = EXAMPLES["fleet"]
    for verb, code in (("verify", 3), ("report", 3)):
        found, done = document("fleet", verb, tmp_path / "fleet")
        assert found == code
        assert set(done) == set(example)
        part = "rows" if verb == "report" else "wrong"
        assert ordered(shape(done[part])) == ordered(shape(example[part]))
        assert ordered(shape({**done, "wrong": [], "rows": []})) == ordered(shape({**example, "wrong": [], "rows": []}))


def test_documents_of_retention_are_as_shown(document, invoke, eventful):
    """prune, pin and unpin print what json.md shows."""
    (eventful / "net-400.pt").unlink()
    for name in ("pin", "unpin"):
        _, found = document(name, eventful / "net-200.pt", *(("--note", "n") if name == "pin" else ()))
        assert ordered(shape(found)) == ordered(shape(EXAMPLES[name]))
    rules = ("--keep-last", "1", "--keep-within", "1s", "--keep-best", "loss:min")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("CKPTGUARD_KEEP_GOOD", "1")
        _, found = document("prune", eventful, "--keep-last", "1", "--keep-bytes", "9TB")
        patched.setenv("CKPTGUARD_TRASH_GRACE", "0")
        assert set(found) == set(EXAMPLES["prune"])
        _, emptied = document("prune", eventful, *rules)
    for key in ("emptied", "in_trash"):
        assert shape(found["in_trash"]) == shape(EXAMPLES["prune"][key])
    found["emptied"] = emptied["emptied"]
    assert found["thinned"] == []  # a single file is not thinned
    assert ordered(shape(found)) == ordered(shape({**EXAMPLES["prune"], "thinned": []}))


def test_documents_of_a_silence_are_as_shown(document, invoke, eventful):
    """silence prints what json.md shows, and `status` and `fleet` have the same in them."""
    _, made = document("silence", eventful, "--until", "8h", "--reason", "r")
    assert ordered(shape(made)) == ordered(shape(EXAMPLES["silence"]))
    assert document("status", eventful)[1]["silence"] == made["silence"]
    assert document("fleet", "report", eventful.parent)[1]["rows"][0]["silence"] == made["silence"]
    assert document("silence", eventful, "--end")[1] == {**made, "silence": None}


def test_the_document_of_migrate_is_as_shown(document, eventful):
    """migrate prints what json.md shows, also what changes."""
    (eventful / "_ckptguard/format.json").write_text('{"format":1}\n')
    code, found = document("migrate", eventful, "--dry-run")
    assert code == 0
    assert {**found, "target": ""} == {**EXAMPLES["migrate"], "target": ""}


def test_documents_of_scrub_and_repair_are_as_shown(document, eventful):
    """scrub and repair print what json.md shows."""
    path = eventful / "net-300.pt"
    flip(path, -5000)
    _, found = document("scrub", eventful)
    [bad] = [one for one in found["places"] if one["outcome"] == "bad" and one["step"] == 300]
    found["places"] = [{**bad, "findings": bad["findings"][:1]}]
    assert ordered(shape(found)) == ordered(shape(EXAMPLES["scrub"]))
    _, found = document("repair", eventful)
    [checked] = found["checkpoints"]
    checked["findings"] = [f for f in checked["findings"] if f["check"] == "repair"]
    assert ordered(shape(found)) == ordered(shape(EXAMPLES["repair"]))


def test_documents_of_incidents_are_as_shown(document, invoke, eventful):
    """incidents and incident print what json.md shows, with all that a guard can tell."""
    invoke("verify", eventful)
    run = open_run(str(eventful))
    details = Details(
        onset=399,
        samples=(Sample(400, "nan", "inf", 2048.0, 1e-4),),
        training=Training(dtypes={"float16": 1}),
        resumed=Resumed(step=200),
    )
    update_incident(run, list_incidents(run)[0], details=details)
    said = {"verb": "pin", "name": "alice", "role": "operator", "reason": "why", "plan": "d"}
    end_action(run, begin_action(run, arguments={"checkpoint": "300"}, **said), "done", ["pinned net-300.pt"])
    for name, options in (("incidents", ()), ("incident", ("--read",))):
        _, found = document(name, eventful, *options)
        assert ordered(shape(found)) == ordered(shape(EXAMPLES[name]))


def test_the_outcome_words_are_the_contract(document, eventful):
    """The words of the outcomes are those that scripts compare with."""
    found = document("verify", eventful)[1]
    assert found["outcome"] == "bad"
    assert {c["outcome"] for c in found["checkpoints"]} == {"good", "bad"}


def test_many_findings_end_with_how_many_were_omitted(document, root):
    """More than 50 findings of one check are cut, and the last one says so."""
    torch.save({f"w{i:03d}": torch.full((2, 2), float("nan")) for i in range(70)}, root / "net-1.pt")
    findings = [f for f in document("verify", root)[1]["checkpoints"][0]["findings"] if f["check"] == "finite"]
    assert len(findings) == 51
    assert findings[-1]["omitted"] == 20
    assert all("omitted" not in f for f in findings[:-1])


def test_numbers_that_json_does_not_know_are_null():
    """A document never holds NaN or Infinity, which strict parsers refuse."""
    assert plain({"a": [float("nan"), 1.5], "b": float("-inf")}) == {"a": [None, 1.5], "b": None}


def test_names_that_are_not_text_survive(invoke, root):
    """A file name that is no UTF-8 comes through JSON exactly, and as an escape in text."""
    write_torch(root, 5, seed=5)
    (root / "net-5.pt").rename(root / b"net\xff-5.pt".decode("utf-8", "surrogateescape"))
    result = invoke("verify", root, "--no-record", "--json")
    if result.exit_code == 0:
        [found] = json.loads(result.stdout)["checkpoints"]
        assert found["path"] == "net\udcff-5.pt"
    else:
        assert result.stderr.startswith("error: ")
        assert "unexpected" not in result.stderr
