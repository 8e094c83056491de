"""Log lines for people: when, how serious, and one sentence."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ckptguard.values.ids import name_of_run, parse_id
from ckptguard.values.plain_numbers import size

# What is said of an event, by its fields. Other events name their fields, and so do those that lack one.
_SENTENCES = {
    "answer_failed": "a request could not be answered: {reason}",
    "catalogue": "{reason}",
    "certificate_read": "the certificate {file} is used from now on",
    "certificate_refused": "the certificate stays as it was: {reason}",
    "could_not_tell": "could not tell: {reason}",
    "decided": "the incident {incident} of {run} is closed, {seconds:.0f} s after its trouble began ({decision})",
    "enough_room": "{run} has room for all kept copies again",
    "fleet_not_searched": "the fleet could not be searched: {reason}",
    "fleet_trouble": "{reason}",
    "gone": "{path} is gone",
    "guarding": "watching {run}",
    "hook_abandoned": "{to} ({hook}) was not told before the end: the next start tells it",
    "hook_event_dropped": "{to} ({hook}) is a thousand events behind: one was dropped",
    "hook_failed": "{to} ({hook}) was not told: {reason}",
    "hook_missing": "{reason}",
    "hook_ran": "{to} ({hook}) was told",
    "hook_records": "who was told of {run} cannot be noted: {reason}",
    "http": "the dashboard is at {url}",
    "hook_silenced": "{to} ({hook}) was not told: {run} is silenced",
    "incident": "incident: {reason}",
    "incident_made_up": "the incident of {path} was opened: who judged it did not",
    "incident_not_recorded": "the incident of {path} could not be recorded: {reason}",
    "library": "{message}",
    "limit": "the limit of {limit} is over: what has no verdict yet stays pending",
    "limit_forced": "the storage does not answer: ended all the same, and what has no verdict yet stays pending",
    "login_refused": "a login from {address} was refused: its token or link was wrong",
    "looking": "looking at {run}, which another daemon guards",
    "lost": "{reason}",
    "metrics": "Prometheus finds the metrics at {address}",
    "metrics_not_written": "the metrics cannot be written to {file}: {reason}",
    "metrics_refused": "nobody gets the metrics: {reason}",
    "not_enough_room": "{run}: {reason}; free some space to have more copies",
    "no_such_checkpoint": "there is no checkpoint {path}",
    "not_understood": "{run}: {reason}",
    "not_catalogued": "{run} could not be noted in the catalogue: {reason}",
    "parent_gone": "the process that started this daemon has ended",
    "pending": "{path} has no verdict yet: {reason}",
    "plan_not_reloaded": "the settings and the fleet stay as they were: {reason}",
    "plan_reloaded": "the settings and the fleet were read again",
    "pruned": "{path} was moved to the trash: no rule keeps it",
    "pruned_in_replica": "{path} was moved to the trash of the replica {replica}: its rule keeps it no longer",
    "thinned": "{path} was thinned: what only a resume needs was moved to the trash",
    "recovered": "{run} can be read again",
    "replica_in_trouble": "the replica {replica} cannot be brought up to date: {reason}",
    "replica_recovered": "the replica {replica} is up to date again",
    "replicated": "{path}{save} to {replica}: {done}",
    "run_left": "{run} is not in the fleet any more, and is not watched any more",
    "scrubbed": "{path}{save} was read again: {outcome}",
    "searching": "searching for runs in {folders}",
    "sessions_not_kept": "who is logged in is forgotten at the next start: {reason}",
    "settings_ignored": "{reason}",
    "started": "ckptguard-daemon {version} started (pid {pid})",
    "stop_forced": "stopped: what did not answer was not waited for, and the next start makes up for it",
    "stopped": "ckptguard-daemon stopped",
    "tokens_read": "{file} was read again and has {tokens} tokens",
    "tokens_refused": "nobody can log in: {reason}",
    "unfinished": "{path} is unfinished, and has not changed for two of the run's usual save intervals: {reason}",
    "unverified": "{path} went, or was saved over, before it could be verified",
    "waiting": "waiting for the run: {reason}",
    "ended": "{run} was removed, so it has ended",
    "failing": "the run cannot be looked at: {reason}",
    "hints_failed": "the queue {queue} gives no hints, so object stores are looked at by the timer: {reason}",
    "hints_received": "the queue {queue} gives hints again",
    "watching_by_timer_only": "changes in {folder} are seen by the timer only: {reason}",
}
_KNOWN = "known-good is {path}{save}"
_NONE_KNOWN = "nothing is known-good: {reason}"


def sentence(line: Mapping[str, Any]) -> str:
    """A log line as `log` makes it, as text: its time, its level where it is not "info", and a sentence."""
    fields = {name: value for name, value in line.items() if name not in ("time", "level", "event")}
    run, path = fields.get("run"), fields.get("path")
    is_in_run = isinstance(path, str) and not os.path.isabs(path) and "://" not in path
    if isinstance(run, str) and is_in_run:  # a daemon may watch many runs
        fields["path"] = f"{name_of_run(run)}/{path}"
    level = "" if line["level"] == "info" else f"{line['level']}: "
    return f"{line['time']}  {level}{_words(line['event'], fields)}"


def _words(event: str, fields: Mapping[str, Any]) -> str:
    if event == "verified":
        return _of_verdict(fields)
    template = None if fields.get("exit_code") else _SENTENCES.get(event)
    if event == "http" and fields.get("link"):  # one address is enough: the one that logs in
        template = "the dashboard is ready: its link follows"
    if event == "known_good":
        template = _NONE_KNOWN if fields.get("id") is None else _KNOWN
    try:
        return template.format_map({**fields, "save": _save(fields)}) if template is not None else _named(event, fields)
    except KeyError:
        return _named(event, fields)


def _of_verdict(fields: Mapping[str, Any]) -> str:
    seconds = fields.get("seconds")
    took = "" if seconds is None else f" in {seconds:.1f} s"
    reason = f": {fields['reason']}" if fields.get("reason") else ""
    return f"{fields['path']}{_save(fields)} is {fields['outcome']}{reason} ({size(fields.get('bytes'))}{took})"


def _save(fields: Mapping[str, Any]) -> str:
    """Which save of its name a checkpoint is, where it is not the first."""
    id = parse_id("", str(fields.get("id")))
    return "" if id is None else id.nth_save


def _named(event: str, fields: Mapping[str, Any]) -> str:
    named = ", ".join(f"{name} {value}" for name, value in fields.items() if value is not None)
    words = event.replace("_", " ")
    return f"{words}: {named}" if named else words
