"""Records: exclusive, ordered by names, readable after damage, refused when too new."""

import os
import threading

import pytest
from support.faults import flip
from support.records_on_disk import at
from support.runs import write_torch
from support.views import entry_name, look

from ckptguard.errors import RecordsError, SettingsError
from ckptguard.records.incidents import list_incidents, open_incident, update_incident
from ckptguard.records.lineage import begin_lineage
from ckptguard.records.run import create_record, has_records, list_records, open_run
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.runs.history import load_history
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.ids import CheckpointId
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome
from ckptguard.verification.checkpoint import verify_checkpoint


def ledger(root):
    """The folder of the entries."""
    return at(root, "_ckptguard/ledger/net-#.pt")


def test_a_verdict_is_not_lost_to_an_empty_entry_of_its_name(root, three):
    """What a broken write left can never be filled: damage that was found is recorded under the next number."""
    reconcile(look(three), PassNotes())
    (ledger(root) / entry_name(300, 1, 2, Outcome.BAD)).write_bytes(b"")
    flip(root / "net-300.pt")
    view = look(three)
    assert verify_checkpoint(view, view.checkpoint("net-300.pt")).outcome is Outcome.BAD
    assert load_history(three).verdict(CheckpointId("net-#.pt", 300, 1)).outcome is Outcome.BAD
    assert find_known_good(three).place == "kept"  # whose bytes are not those that rotted


def test_a_manifest_that_was_written_and_is_gone_is_forgotten(root, run):
    """One that this process wrote itself is no exception."""
    write_torch(root, 100, seed=1)
    view = look(run)
    id = verify_checkpoint(view, view.checkpoint("net-100.pt")).id
    at(root, f"_ckptguard/manifests/{id.record_path}.json").unlink()
    view.refresh("net-#.pt")
    assert set(view.history.sealed("net-#.pt")) == set()


def test_records_elsewhere_are_those_of_one_run(root, tmp_path):
    """A verdict on one run's checkpoint is none on its namesake in another. A run that was moved keeps its records."""
    places = {name: tmp_path / name for name in ("one", "other")}
    for seed, place in enumerate(places.values()):
        write_torch(place, 300, seed=seed)
    records = str(tmp_path / "records")
    one = open_run(str(places["one"]), Settings(records=records))
    reconcile(look(one), PassNotes())
    with pytest.raises(SettingsError, match="belong to another run"):
        open_run(str(places["other"]), Settings(records=records))
    (tmp_path / "link").symlink_to(places["one"])
    assert str(find_known_good(open_run(str(tmp_path / "link"), Settings(records=records))).id) == "300.1"
    places["one"].rename(tmp_path / "moved")
    (tmp_path / "link").unlink()
    assert (
        find_known_good(open_run(str(tmp_path / "moved"), Settings(records=records))).path
        == f"{tmp_path}/moved/net-300.pt"
    )


def test_of_two_runs_that_begin_records_at_once_one_has_them(tmp_path):
    """Both were opened before anything lay there: the later one is refused at its first record, and at every other."""
    records, places = str(tmp_path / "records"), [tmp_path / "one", tmp_path / os.fsdecode(b"other\xff")]
    for place in places:
        place.mkdir()
    one, other = (open_run(str(place), Settings(records=records)) for place in places)
    create_record(one, "ledger/a.json", b"{}")
    for _ in range(2):
        with pytest.raises(SettingsError, match="belong to another run"):
            create_record(other, "ledger/b.json", b"{}")
    assert list_records(one, "ledger") == ["a.json"]
    create_record(open_run(str(places[1]), Settings(records=str(tmp_path / "of its own"))), "ledger/b.json", b"{}")
    assert has_records(open_run(str(places[1]), Settings(records=str(tmp_path / "of its own"))))
    assert begin_lineage(open_run(str(places[1]))).begun == f"{tmp_path}/other\\udcff"


def test_a_newer_format_is_refused_with_a_sentence(root, three):
    """Records of a newer major are not guessed at."""
    reconcile(look(three), PassNotes())
    (root / "_ckptguard" / "format.json").write_text('{"format": 3}')
    with pytest.raises(RecordsError, match="format 3"):
        open_run(str(root))


def test_a_moved_run_keeps_its_verdicts(root, three, tmp_path):
    """Records hold paths relative to the run."""
    reconcile(look(three), PassNotes())
    root.rename(tmp_path / "moved")
    moved = open_run(str(tmp_path / "moved"))
    assert find_known_good(moved).path == str(tmp_path / "moved" / "net-300.pt")
    assert reconcile(look(moved), PassNotes()).pending == ()


def test_many_verifiers_at_once_leave_one_manifest_and_one_verdict(root, run):
    """Threads that verify the same new checkpoint agree on one generation."""
    write_torch(root, 100, seed=1)
    checkpoint = look(run).checkpoint("net-100.pt")
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(verify_checkpoint(look(run), checkpoint))) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {(str(r.id), r.outcome) for r in results} == {("100.1", Outcome.GOOD)}
    assert len(list(at(root, "_ckptguard/manifests/net-#.pt").iterdir())) == 1


def test_records_elsewhere_leave_the_run_untouched(root, three, tmp_path):
    """records = URL: verdicts and copies go there, and nothing of ours lies in the run."""
    elsewhere = tmp_path / "records"
    own = open_run(str(root), Settings(records=str(elsewhere)))
    reconcile(look(own), PassNotes())
    assert sorted(p.name for p in root.iterdir()) == ["net-100.pt", "net-200.pt", "net-300.pt"]
    (root / "net-300.pt").unlink()
    answer = find_known_good(own)
    assert (str(answer.id), answer.kept) == ("300.1", True)
    assert answer.path.startswith(str(elsewhere))


def test_incidents_keep_every_revision_and_the_newest_counts(root, run):
    """An incident is changed by adding revisions; non-finite evidence is kept as words."""
    first = open_incident(
        run, step=7, cause="numeric", reason="loss is NaN", evidence={"loss": float("nan"), "k": [1]}, source="guard"
    )
    update_incident(run, first, state="closed", action="went back to 5.1", known_good="5.1")
    [incident] = list_incidents(run)
    assert (incident.revision, incident.state, incident.actions) == (2, "closed", ("went back to 5.1",))
    assert incident.evidence == {"loss": "nan", "k": [1]}
    assert len(list((root / "_ckptguard" / "incidents").iterdir())) == 2


def test_a_run_in_memory(tmp_path):
    """Everything above the storage works on memory:// as on disk."""
    import fsspec

    write_torch(tmp_path, 100, seed=1)
    write_torch(tmp_path, 200, seed=2)
    memory = fsspec.filesystem("memory")
    for name in ("net-100.pt", "net-200.pt"):
        memory.pipe_file(f"/runs/records-test/{name}", (tmp_path / name).read_bytes())
    try:
        run = open_run("memory://runs/records-test")
        done = reconcile(look(run), PassNotes())
        assert [c.outcome for c in done.checked] == [Outcome.GOOD, Outcome.GOOD], done
        memory.rm("/runs/records-test/net-200.pt")
        answer = find_known_good(run)
        assert (str(answer.id), answer.kept) == ("200.1", True)
        assert memory.cat_file(answer.path) == (tmp_path / "net-200.pt").read_bytes()
        assert set(load_history(run).names) == {"net-#.pt"}
    finally:
        memory.rm("/runs/records-test", recursive=True)
