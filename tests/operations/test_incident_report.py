"""Reports from the records, and from the bytes: what an incident tells that nobody saw from inside of training."""

import msgspec
import pytest
import torch
from fixtures_runs import QUICK, state_dict, write_torch

from ckptguard.errors import NotFoundError
from ckptguard.incident import Details, Sample, SickTensor
from ckptguard.operations.incident_report import MOST_TENSORS, choose_incident, report_of
from ckptguard.operations.reconcile import Watch, reconcile
from ckptguard.records.incidents import list_incidents, open_incident, read_incident, update_incident


def opened(run, *, step=420, cause="numeric", evidence=None, source="callback"):
    """An incident as a callback reports it: no details."""
    return open_incident(
        run, step=step, cause=cause, reason="the gradient norm is nan", evidence=evidence or {}, source=source
    )


@pytest.fixture
def sick(root, run):
    """Good checkpoints at 100 to 300, and one with NaN at 400, all verified."""
    for step in (100, 200, 300):
        write_torch(root, step, seed=step)
    state = state_dict(4)
    state["embed.weight"][0, :2] = float("nan")
    state["layers.1.key.weight"][0, 0] = float("inf")
    torch.save(state, root / "net-400.pt")
    reconcile(run, QUICK, Watch())
    return run


def test_records_alone_make_a_report(sick):
    """Last good, first bad, what was wrong in it, and the headroom, without reading a checkpoint."""
    details = report_of(sick, opened(sick)).details
    assert (details.last_good.id, details.last_good.path) == ("300.1", "net-300.pt")
    assert (details.first_bad.id, details.first_bad.outcome) == ("400.1", "bad")
    assert {t.name for t in details.tensors} == {"embed.weight", "layers.1.key.weight"}
    assert details.tensors_from == "net-400.pt"
    sizes = [m.largest for m in details.last_good.largest]
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) > 5
    assert details.causes


def test_bytes_tell_how_much_of_each_tensor(root, sick):
    """With `read`, tensors come counted and in the model's order; without the bytes, the record's words stay."""
    incident = opened(sick)
    tensors = report_of(sick, incident, read=True).details.tensors
    assert [(t.name, t.nan, t.inf) for t in tensors] == [("layers.1.key.weight", 0, 1), ("embed.weight", 2, 0)]
    assert {t.kind for t in tensors} == {"weight"}
    (root / "net-400.pt").unlink()
    (root / "net-300.pt").unlink()
    gone = report_of(sick, incident, read=True).details
    assert {t.name for t in gone.tensors} == {"embed.weight", "layers.1.key.weight"}


def test_what_was_concluded_stays(sick):
    """A closed incident keeps its details although the run went on; an open one is looked at anew."""
    report = report_of(sick, opened(sick))
    details = msgspec.structs.replace(report.details, onset=411)
    incident = update_incident(sick, list_incidents(sick)[0], state="closed", details=details)
    assert report_of(sick, incident).details == details


def test_the_checkpoint_of_the_evidence_is_the_bad_one(root, sick):
    """An incident about a certain checkpoint is about that one, wherever its step lies."""
    incident = opened(sick, step=None, evidence={"checkpoint": "400.1", "series": "net-#.pt"}, source="daemon")
    assert report_of(sick, incident).details.first_bad.id == "400.1"


def test_the_named_known_good_is_the_last_good(sick):
    """Where training went back further, the report follows."""
    incident = update_incident(sick, opened(sick), known_good="200.1")
    details = report_of(sick, incident).details
    assert details.last_good.id == "200.1"


@pytest.mark.parametrize("cause", ["storage", "asked", "unsaved"])
def test_what_is_no_sickness_blames_no_checkpoint(sick, cause):
    """A full disk or a request has no first bad checkpoint."""
    details = report_of(sick, opened(sick, cause=cause)).details
    assert (details.first_bad, details.last_good, details.tensors) == (None, None, ())


def test_an_empty_run_has_a_report(run):
    """Nothing was ever saved: the report says what it can."""
    report = report_of(run, opened(run), read=True)
    assert report.details.last_good is None
    assert [c.name for c in report.details.causes] == ["unknown"]


def test_a_record_beyond_all_measure_is_cut(sick):
    """Samples and tensors of a record are bounded before anything is made of them."""
    endless = Details(
        samples=tuple(Sample(n, 1.0) for n in range(9000, 0, -1)),
        tensors=tuple(SickTensor(name=str(n), kind="weight") for n in range(500)),
    )
    details = report_of(sick, update_incident(sick, opened(sick), details=endless)).details
    assert len(details.samples) == 2000
    assert [s.step for s in details.samples] == sorted(s.step for s in details.samples)
    assert (len(details.tensors), details.tensors_omitted) == (MOST_TENSORS, 500 - MOST_TENSORS)


def test_revisions_keep_the_details(run):
    """An update without details leaves them as they are; the newest revision is read by its name."""
    first = update_incident(run, opened(run), details=Details(onset=7, samples=(Sample(7, "nan"),)))
    update_incident(run, first, state="closed", action="went back")
    found = read_incident(run, first.id)
    assert (found.revision, found.state, found.known_details().onset) == (3, "closed", 7)
    assert found.known_details().samples == (Sample(7, "nan"),)
    assert read_incident(run, "20260131T120000-00000000") is None


def test_incidents_are_chosen_by_their_id(run):
    """The whole id, the start of one, or the newest; two of the same start, or none, are a clear sentence."""
    with pytest.raises(NotFoundError, match="no incident"):
        choose_incident(run, None)
    ids = sorted(opened(run, step=n).id for n in range(2))
    assert choose_incident(run, ids[0]).id == ids[0]
    assert choose_incident(run, ids[1][:-1]).id == ids[1]
    assert choose_incident(run, None).id == ids[1]
    with pytest.raises(NotFoundError, match="begins 2 incidents"):
        choose_incident(run, ids[0][:4])
    with pytest.raises(NotFoundError, match="no incident 1999"):
        choose_incident(run, "1999")


def test_a_mangled_detail_hides_no_other_incident(root, run):
    """A record whose details are not what they should be is passed over, like any damaged record."""
    keep, bad = opened(run, step=1), opened(run, step=2)
    path = root / "_ckptguard" / "incidents" / f"{bad.id}.0001.json"
    path.write_text(path.read_text().replace('"known_good":null', '"known_good":null,"details":{"samples":[["x"]]}'))
    assert [i.id for i in list_incidents(run)] == [keep.id]
