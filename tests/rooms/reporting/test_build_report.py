"""Reports from the records, and from the bytes: what an incident tells that nobody saw from inside of training."""

import json
from pathlib import Path

import msgspec
import pytest
import torch
from support.faults import flip
from support.runs import save_file, state_dict, write_torch
from support.views import look

from ckptguard.errors import NotFoundError
from ckptguard.records.incidents import list_incidents, open_incident, read_incident, update_incident
from ckptguard.recover.roll_back import GoBack, roll_back
from ckptguard.reporting.build_report import MOST_TENSORS, choose_incident, report_of
from ckptguard.reporting.open_and_close import close_incident, record_bad_save
from ckptguard.reporting.report_text import report_text
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.incident import Details, Sample, SickTensor
from ckptguard.verification.checkpoint import verify_checkpoint


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
    reconcile(look(run), PassNotes())
    return run


def test_records_alone_make_a_report(sick):
    """Last good, first bad, what was wrong in it, and the headroom, without reading a checkpoint."""
    details = report_of(look(sick), opened(sick)).details
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
    tensors = report_of(look(sick), incident, read=True).details.tensors
    assert [(t.name, t.nan, t.inf) for t in tensors] == [("layers.1.key.weight", 0, 1), ("embed.weight", 2, 0)]
    assert {t.kind for t in tensors} == {"weight"}
    (root / "net-400.pt").unlink()
    (root / "net-300.pt").unlink()
    gone = report_of(look(sick), incident, read=True).details
    assert {t.name for t in gone.tensors} == {"embed.weight", "layers.1.key.weight"}


def test_the_bytes_tell_what_changed(root, sick):
    """With `read`: what became non-finite first, then what changed most, and its headroom before."""
    incident = opened(sick)
    assert report_of(look(sick), incident).details.changes == ()
    assert "--read" in report_text(report_of(look(sick), incident))
    report = report_of(look(sick), incident, read=True)
    changes = report.details.changes
    assert [(c.name, c.became_nonfinite) for c in changes[:2]] == [("layers.1.key.weight", 1), ("embed.weight", 2)]
    good = torch.load(root / "net-300.pt")
    assert changes[1].largest == pytest.approx(float(good["embed.weight"].abs().max()))
    moved = [c.relative_l2 for c in changes[2:] if c.relative_l2 is not None]
    assert moved == sorted(moved, reverse=True)
    assert len(changes) + report.details.changes_omitted == len(good)
    text = report_text(report)
    assert "From net-300.pt (step 300) to net-400.pt" in text
    assert "2 of 4,608 became NaN or Inf, first at [0, 0]" in text


def test_what_cannot_be_compared_is_said(root, sick):
    """A first bad checkpoint that lost its end is compared as far as it goes, and the report says so."""
    path = root / "net-400.pt"
    path.write_bytes(path.read_bytes()[:-2000])
    details = report_of(look(sick), opened(sick), read=True).details
    assert details.changes_note is not None


def test_what_was_concluded_stays(sick):
    """A closed incident keeps its details although the run went on; an open one is looked at anew."""
    report = report_of(look(sick), opened(sick))
    details = msgspec.structs.replace(report.details, onset=411)
    incident = update_incident(sick, list_incidents(sick)[0], state="closed", details=details)
    assert report_of(look(sick), incident).details == details


def test_the_checkpoint_of_the_evidence_is_the_bad_one(root, sick):
    """An incident about a certain checkpoint is about that one, wherever its step lies."""
    incident = opened(sick, step=None, evidence={"checkpoint": "400.1", "series": "net-#.pt"}, source="daemon")
    assert report_of(look(sick), incident).details.first_bad.id == "400.1"


def test_the_named_known_good_is_the_last_good(sick):
    """Where training went back further, the report follows."""
    incident = update_incident(sick, opened(sick), known_good="200.1")
    details = report_of(look(sick), incident).details
    assert details.last_good.id == "200.1"


@pytest.mark.parametrize("cause", ["storage", "asked", "unsaved"])
def test_what_is_no_sickness_blames_no_checkpoint(sick, cause):
    """A full disk or a request has no first bad checkpoint."""
    details = report_of(look(sick), opened(sick, cause=cause)).details
    assert (details.first_bad, details.last_good, details.tensors) == (None, None, ())


def test_the_last_good_of_a_fixed_name_is_an_earlier_save_of_it(root, run):
    """It has no step; the report names it by its path, and by no id."""
    for bad in (False, True):
        state = state_dict(1 + bad)
        state["embed.weight"][:] = float("nan") if bad else 1.0
        torch.save(state, root / "last.pt")
        for checked in reconcile(look(run), PassNotes()).checked:
            record_bad_save(run, checked, source="daemon")
    (incident,) = list_incidents(run)
    report = report_of(look(run), incident)
    assert report.details.last_good.outcome == "good"
    text = report_text(report)
    assert "last good: an earlier save of last.pt\n" in text
    assert "noticed:   in last.pt, by the daemon\n" in text
    assert "-." not in text.replace("--", "")
    assert "onset" not in text


def test_an_empty_run_has_a_report(run):
    """Nothing was ever saved: the report says what it can."""
    report = report_of(look(run), opened(run), read=True)
    assert report.details.last_good is None
    assert [c.name for c in report.details.causes] == ["unknown"]


def test_a_record_beyond_all_measure_is_cut(sick):
    """Samples and tensors of a record are bounded before anything is made of them."""
    endless = Details(
        samples=tuple(Sample(n, 1.0) for n in range(9000, 0, -1)),
        tensors=tuple(SickTensor(name=str(n), kind="weight") for n in range(500)),
    )
    details = report_of(look(sick), update_incident(sick, opened(sick), details=endless)).details
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


@pytest.fixture
def logged(root, run):
    """Two saves of a Trainer, the second one poisoned; its log prints a loss of 0 for NaN. Verified."""
    for step, bad in ((4, False), (8, True)):
        folder = root / f"checkpoint-{step}"
        folder.mkdir()
        state = {"w": torch.full((4, 4), float("nan") if bad else 1.5, dtype=torch.float16)}
        save_file(state, folder / "model.safetensors")
        (folder / "config.json").write_text("{}")
        log = [{"step": n, "loss": 2.0, "grad_norm": 0.5, "learning_rate": 1e-4} for n in range(1, 6)]
        log += [{"step": n, "loss": 0.0, "grad_norm": float("nan"), "learning_rate": 1e-4} for n in (6, 7, 8)]
        odd = [{"eval_loss": 1.0, "step": 4}, "x", {"step": -1, "loss": 1.0}, {"step": True, "loss": 1}, {"loss": 3.0}]
        text = {"global_step": step, "log_history": [e for e in log if e["step"] <= step] + odd}
        (folder / "trainer_state.json").write_text(json.dumps(text))
    reconcile(look(run), PassNotes())
    return run


@pytest.mark.parametrize("moved", [False, True])
def test_the_trainers_own_log_is_the_curve_and_tells_the_onset(logged, moved):
    """Nobody was inside of training: the curve comes from the log of the bad save, in place or moved aside."""
    if moved:
        roll_back(look(logged), GoBack(reason="test", check_writing=False))
    details = report_of(look(logged), opened(logged, step=8, source="supervise")).details
    assert [s.step for s in details.samples] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert details.samples[-1] == Sample(8, 0.0, "nan", None, 1e-4)
    assert (details.onset, details.last_good.step, details.first_bad.step) == (6, 4, 8)
    assert details.causes[0].name == "fp16_overflow"  # the weights are saved in fp16
    assert "stands for NaN" in report_text(report_of(look(logged), opened(logged, step=8)))


def test_a_log_that_is_none_is_no_error(root, logged):
    """A torn log says nothing."""
    (root / "checkpoint-8" / "trainer_state.json").write_text('{"log_history": [')
    assert report_of(look(logged), opened(logged, step=8)).details.samples == ()


def test_closing_leaves_the_report(root, sick):
    """Text, page and conclusions, once; a later closing keeps the first report."""
    incident = opened(sick)
    path = close_incident(sick, incident, action="went back to 300.1", known_good="300.1")
    text = Path(path).read_text()
    assert "went back to 300.1" in text
    (found,) = list_incidents(sick)
    assert (found.state, found.known_good, len(found.known_details().causes) > 0) == ("closed", "300.1", True)
    close_incident(sick, found, action="again")
    assert Path(path).read_text() == text
    assert (root / "_ckptguard" / "incidents" / f"{incident.id}.html").exists()


def test_a_bad_save_is_recorded_once(root, three):
    """Damage and NaN are told apart; what is good or recorded already is not recorded."""
    reconcile(look(three), PassNotes())
    flip(root / "net-200.pt", None, 0xFF, new_times=True)
    state = state_dict(4)
    state["embed.weight"][0, 0] = float("nan")
    torch.save(state, root / "net-400.pt")
    for _ in range(2):
        for path in ("net-100.pt", "net-200.pt", "net-400.pt"):
            checked = verify_checkpoint(look(three), look(three).checkpoint(path))
            record_bad_save(three, checked, source="daemon")
    found = {i.step: i for i in list_incidents(three)}
    assert {step: i.cause for step, i in found.items()} == {200: "damage", 400: "numeric"}
    assert len(list_incidents(three)) == 2
    damaged = report_of(look(three), found[200]).details
    assert (damaged.first_bad.id, damaged.causes[0].name) == ("200.1", "damaged_file")
    assert report_of(look(three), found[400]).details.last_good.id == "300.1"
    assert (root / "_ckptguard" / "incidents" / f"{found[200].id}.html").exists()


def test_a_mangled_detail_hides_no_other_incident(root, run):
    """A record whose details are not what they should be is passed over, like any damaged record."""
    keep, bad = opened(run, step=1), opened(run, step=2)
    path = root / "_ckptguard" / "incidents" / f"{bad.id}.0001.json"
    path.write_text(path.read_text().replace('"known_good":null', '"known_good":null,"details":{"samples":[["x"]]}'))
    assert [i.id for i in list_incidents(run)] == [keep.id]


def test_the_newest_incident_is_the_last_one_of_its_second(run):
    """Several in one second: the report without an id is that of the last."""
    made = [opened(run, step=step).id for step in range(30)]
    assert [i.id for i in list_incidents(run)] == made
    assert choose_incident(run, None).step == 29


def test_who_gave_up_did_not_go_back_and_has_a_last_good_one(sick):
    """The head names the last good checkpoint, and does not say that nothing is known-good."""
    incident = opened(sick)
    close_incident(sick, incident, action="gave up: the budget of 3 rollbacks is spent")
    text = report_text(report_of(look(sick), read_incident(sick, incident.id)))
    assert "last good:" in text
    assert "known-good: -" not in text
