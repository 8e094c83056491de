"""The audit: who had what done to a run, why, and what came of it. It is written before an action begins, and again
when it has ended. So one that was killed in between stays on record as begun.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from ckptguard.errors import CouldNotTellError, RecordsError
from ckptguard.records.run import Run, create_record, list_records, read_parsed
from ckptguard.records.who_and_when import Owner, dated_name, has_ended, this_process, utc_now
from ckptguard.storage.redaction import redacted
from ckptguard.values.ids import escape
from ckptguard.values.record_formats import ACTION

FOLDER = "audit"
MOST = 1000  # actions on record; the oldest are removed
LONGEST_REASON = 1000  # characters
_LONGEST, _MOST_LINES = 500, 100  # characters of any other text, and lines of a result
BEGAN, CUT_SHORT = "began", "cut short"
DONE, FAILED, REFUSED, STOPPED = "done", "failed", "refused", "stopped"
_NAME = re.compile(r"(?P<id>\d{8}T\d{6}-[0-9a-f]{8})\.(?P<state>began|ended)\.json")


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """One action. `name` and `role` are those of the token that asked for it, `owner` is the process that did it.

    - `plan`: the digest of the plan that was agreed to.
    - `state`: began, done, failed, refused (the plan had changed) or stopped (the daemon ended).
    - `result`: what was done, or why not, as lines.
    """

    format: int = ACTION.writes
    id: str
    verb: str
    name: str
    role: str
    owner: Owner
    arguments: dict[str, Any] = {}
    reason: str
    plan: str
    began_at: str
    state: str = BEGAN
    ended_at: str | None = None
    result: tuple[str, ...] = ()

    @property
    def so_far(self) -> str:
        """Its state, or `CUT_SHORT` if the process that did it has certainly ended."""
        return CUT_SHORT if self.state == BEGAN and has_ended(self.owner) else self.state


def begin_action(
    run: Run, *, verb: str, name: str, role: str, arguments: dict[str, Any], reason: str, plan: str
) -> Action:
    """Record that an action begins now. Raises StorageError: then it must not begin."""
    id, now = dated_name()
    action = Action(
        id=id,
        verb=verb,
        name=_text(name, 100),
        role=role,
        owner=this_process(),
        arguments=_plain(arguments),
        reason=_text(reason, LONGEST_REASON),
        plan=plan,
        began_at=now,
    )
    create_record(run, action_key(id, BEGAN), action)
    with contextlib.suppress(CouldNotTellError):
        _forget_oldest(run)
    return action


def end_action(run: Run, action: Action, state: str, result: Sequence[str]) -> Action:
    """Record what came of an action. Raises StorageError."""
    lines = [_text(line) for line in result[:_MOST_LINES]]
    if len(result) > _MOST_LINES:
        lines.append(f"... and {len(result) - _MOST_LINES} more lines")
    ended = msgspec.structs.replace(action, state=state, ended_at=utc_now(), result=tuple(lines))
    create_record(run, action_key(action.id, "ended"), ended)
    return ended


def list_actions(run: Run, *, most: int = 0) -> list[Action]:
    """Return the newest `most` actions (0: all), oldest first. Those that cannot be read are left out. Raises
    StorageError."""
    found = (read_action(run, id) for id in sorted(_states(run))[-most:])
    return [action for action in found if action is not None]


def known_actions(run: Run) -> list[str]:
    """Return the ids of the newest actions, oldest first. One that begins does not change which these are, but for its
    own. Raises StorageError."""
    return sorted(_states(run))[-MOST // 2 :]


def read_action(run: Run, id: str) -> Action | None:
    """Return an action as it is now on record. None if there is none, or if it cannot be read."""
    return read_state(run, id, "ended") or read_state(run, id, BEGAN)


def read_state(run: Run, id: str, state: str) -> Action | None:
    """Return the record of the beginning or the end of an action. None if there is none, or if it cannot be read."""
    with contextlib.suppress(RecordsError):
        action = read_parsed(run, action_key(id, state), Action, "an action")
        return action if action is None or action.format <= ACTION.reads else None
    return None


def parse_action(name: str) -> tuple[str, str] | None:
    """Return the id and the state (began or ended) that the name of a record below the folder says, or None."""
    match = _NAME.fullmatch(name)
    return (match["id"], match["state"]) if match else None


def action_key(id: str, state: str) -> str:
    """Return the records key of the beginning or the end of an action."""
    return f"{FOLDER}/{id}.{state}.json"


def _states(run: Run) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for parsed in filter(None, map(parse_action, list_records(run, FOLDER))):
        found.setdefault(parsed[0], []).append(parsed[1])
    return found


def _forget_oldest(run: Run) -> None:
    states = _states(run)
    for id in sorted(states)[:-MOST]:
        for state in states[id]:
            run.records.remove(action_key(id, state))


def _plain(value: Any) -> Any:
    """Return a value of limited size. Its texts are escaped."""
    if isinstance(value, dict):
        return {_text(str(key), 100): _plain(inner) for key, inner in list(value.items())[:_MOST_LINES]}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value[:_MOST_LINES]]
    return value if isinstance(value, int | float | None) else _text(str(value))


def _text(text: str, longest: int = _LONGEST) -> str:
    return escape(redacted(text[: 4 * longest]))[:longest]
