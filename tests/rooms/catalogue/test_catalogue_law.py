"""A catalogue is a cache: however it came about, with whatever kills, it holds what a new one would."""

import contextlib
import json
import shutil
import time
from typing import Any
from unittest import mock

from ckptguard_daemon.catalogue_feed import CatalogueFeed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.crashes import Killed
from support.records_on_disk import at
from support.tiny_run import TINY, WEIGHTS, delete, inline, name_of, poison, rot, save
from support.views import look

from ckptguard.catalogue import catalogue as files
from ckptguard.catalogue.catalogue import Catalogue
from ckptguard.engine.watched_run import Passed
from ckptguard.errors import CkptguardError
from ckptguard.records.audit import begin_action, end_action
from ckptguard.records.incidents import list_incidents, open_incident, update_incident
from ckptguard.records.pins import list_pins, pin_checkpoint, release_pin
from ckptguard.records.run import open_run
from ckptguard.records.silences import end_silence, silence_run
from ckptguard.recover.roll_back import GoBack, roll_back
from ckptguard.repair.scrub import scrub
from ckptguard.replicas.replicate import Replica
from ckptguard.replicas.send_checkpoint import Replicated
from ckptguard.runs.work import Work
from ckptguard.training.signals.curve_recorder import CurveRecorder
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.ids import CheckpointId

ON_RECORD = ("verdict", "incident", "rollback", "action")


def rows_of(catalogue: Catalogue, run_id: str) -> Any:
    """All rows of a run. The numbers of events may differ, and what leaves no record is left out."""
    noted = catalogue.noted(run_id)
    if noted is None:
        return None
    events = sorted((one.event for one in noted.events if one.event.kind in ON_RECORD), key=lambda e: e.key)
    summary, digest = catalogue.summary(run_id), catalogue.digest(run_id)
    return summary, digest, dict(noted.generations), dict(noted.incidents), noted.curve, events


SOME = settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))
SETTINGS = TINY.changed(keep="auto", keep_last=3, prune_failed=True, trash_grace=0.0)
STEPS = st.integers(1, 6)
ACTIONS = st.one_of(
    st.tuples(
        st.sampled_from(["save", "save again", "poison", "rot", "delete", "replicate", "roll back", "pin"]), STEPS
    ),
    st.tuples(
        st.sampled_from(
            ["scrub", "incident", "close", "restart", "prune", "act", "act killed", "unpin", "silence", "unsilence"]
        ),
        st.just(0),
    ),
)
WORK = Work(scanner=inline)


class Watched:
    """A run and what its daemon knows of it."""

    def __init__(self, folder):
        self.url = str(folder / "run")
        (folder / "run").mkdir()
        self.folder = folder / "catalogue"
        self.folder.mkdir()
        self.replicas = ()
        self.restart()

    def restart(self):
        """A new process has only the file."""
        self.notes, self.feed = PassNotes(), CatalogueFeed(Catalogue(str(self.folder)))

    @property
    def rows(self):
        """What the file holds."""
        return rows_of(Catalogue(str(self.folder)), open_run(self.url).run_id)

    def act(self, action, step):
        """Do one thing that happens to runs."""
        run = open_run(self.url)
        place = at(self.url, f"{name_of(step)}/{WEIGHTS}")
        if action in ("save", "save again"):
            save(self.url, step, step + 10 * (action != "save"))
        elif action == "poison" and place.exists():
            poison(place)
        elif action == "rot" and place.exists():
            rot(self.url, f"{name_of(step)}/{WEIGHTS}")
        elif action == "delete":
            delete(self.url, step)
        elif action == "replicate":
            self.replicas = replicas_of(look(run), step)
        elif action == "roll back":
            roll_back(look(run, SETTINGS), GoBack(reason="loss", before_step=step, check_writing=False), work=WORK)
        elif action == "pin":
            pin_checkpoint(run, CheckpointId("model-#", step, 1))
        elif action == "unpin":
            for pin in list_pins(run)[:1]:
                release_pin(run, pin)
        elif action == "scrub":
            scrub(look(run, SETTINGS), work=WORK)
        elif action == "incident":
            open_incident(run, step=3, cause="numeric", reason="the loss is NaN", evidence={}, source="guard")
        elif action == "close":
            for incident in list_incidents(run)[:1]:
                update_incident(run, incident, state="closed", action="went back", known_good="2.1")
        elif action == "train":
            recorder = CurveRecorder(run)
            recorder.append((step, 1.0, None, None, None))
            recorder.close(60.0)
        elif action == "log":
            log = at(self.url, f"checkpoint-{step}/trainer_state.json")
            log.parent.mkdir(exist_ok=True)
            log.write_text(json.dumps({"log_history": [{"step": number, "loss": 1.0} for number in range(step)]}))
        elif action == "silence":
            silence_run(run, time.time() + 3600.0, reason="the disk is replaced", by="alice")
        elif action == "unsilence":
            end_silence(run)
        elif action == "prune":
            self.notes.prune_at = 0.0
        elif action == "restart":
            self.restart()
        elif action.startswith("act"):
            begun = begin_action(run, verb="pin", name="alice", role="operator", arguments={}, reason="why", plan="")
            if action == "act":
                end_action(run, begun, "done", ["pinned"])

    def make_pass(self, *, killed=False):
        """One pass, which may be killed before the catalogue's file is replaced. The next process goes on."""
        fatal = mock.patch.object(files, "replace_file", side_effect=Killed)
        try:
            with fatal if killed else contextlib.nullcontext():
                self._pass()
        except Killed:
            self.restart()

    def _pass(self):
        view = look(open_run(self.url), SETTINGS)
        done = reconcile(view, self.notes, work=WORK, assume_quiet=True)
        self.feed.note(view, Passed(notes=self.notes, replicas=self.replicas, wrote=bool(done.checked or done.pruned)))


def replicas_of(view, step):
    """One replica that has what is good up to a step."""
    ids = [id for series in view.history.names for id in view.history.current_verdicts(series) if id.number <= step]
    there = tuple(Replicated(path="", id=id, bytes=1, done="there") for id in ids)
    return (Replica(url="memory://other", behind=1, last_good=None, checkpoints=there),)


@SOME
@given(actions=st.lists(st.tuples(ACTIONS, st.booleans()), min_size=1, max_size=12))
def test_rebuilt_is_incremental(actions, tmp_path_factory):
    """After any saves, damages, verdicts, prunes, rollbacks, replicas, scrubs, incidents and kills before its file is
    replaced, a catalogue that is made anew has the same rows."""
    watched = Watched(tmp_path_factory.mktemp("law"))
    for (action, step), killed in actions:
        try:
            watched.act(action, step)
        except CkptguardError:
            continue  # there is nothing good to go back to
        watched.make_pass(killed=killed)
    for _ in range(2):  # the second finds what the first one wrote
        watched.make_pass()
    grown = watched.rows
    assert not [one for one in watched.feed._runs.values() if one.failures]
    shutil.rmtree(watched.folder)
    watched.folder.mkdir()
    watched.restart()
    watched.make_pass()
    assert watched.rows == grown
    shutil.rmtree(watched.folder.parent)
