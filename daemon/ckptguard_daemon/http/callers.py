"""Who a caller is: by a token, by the session of a browser, or by a link that works once."""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import threading

import msgspec

from ckptguard.errors import SettingsError
from ckptguard.runs.token_file import read_tokens
from ckptguard.storage.local.writes import replace_file
from ckptguard.values.access import Role, Token, digest_of
from ckptguard_daemon.http.routes import Caller
from ckptguard_daemon.log import log

SESSION_SECONDS = 7 * 86400.0
LINK_SECONDS = 600.0
_MOST_SESSIONS = 50  # of one token
_LARGEST = 2**22


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """A browser that logged in. `token` is the digest of its token, or "" if it came by a link with a role."""

    token: str
    role: Role
    expires: float


class Callers:
    """Knows tokens, sessions and links. Sessions survive a restart in a private file; only digests are in it."""

    def __init__(self, tokens: str | None, links: Role | None = None) -> None:
        """`links` is the highest role that a session of a link may have; with None there are none. Raises SettingsError
        if the file of tokens cannot be used."""
        self._most = links
        self._tokens_path, self._sessions_path = tokens, ""
        self._tokens: tuple[Token, ...] = ()
        self._seen: object = None
        self._links: dict[str, tuple[Role, float]] = {}
        self._lock = threading.Lock()
        if tokens is not None:
            self._seen = stamp_of(tokens)
            self._tokens = read_tokens(tokens)
        self._sessions: dict[str, Session] = {}

    def remember(self, path: str) -> None:
        """Keep the sessions in this file, and take those that are in it."""
        self._sessions_path, self._sessions = path, _load(path)

    def look(self) -> None:
        """Read the file of tokens again if it changed. If it is wrong, no token is right."""
        path = self._tokens_path
        if path is None or (stamp := stamp_of(path)) == self._seen:
            return
        self._seen = stamp
        try:
            self._tokens = read_tokens(path)
            log("tokens_read", file=path, tokens=len(self._tokens))
        except SettingsError as error:
            self._tokens = ()
            log("tokens_refused", level="error", reason=error.message)

    def by_secret(self, secret: str, now: float) -> Caller | None:
        """Return whose token this is."""
        return self._by_digest(digest_of(secret), now)

    def by_session(self, secret: str, now: float) -> Caller | None:
        """Return whose session this is. It ends with its token."""
        session = self._sessions.get(digest_of(secret))
        if session is None or session.expires <= now:
            return None
        if not session.token:
            if self._most is None:
                return None  # an earlier daemon had links
            role = min(session.role, self._most)
            return Caller(name="owner", role=role, expires=session.expires, is_owner=True)
        caller = self._by_digest(session.token, now)
        if caller is None:
            return None
        return msgspec.structs.replace(caller, expires=min(session.expires, caller.expires or session.expires))

    def new_link(self, role: Role, now: float) -> str:
        """Return the secret of a link that works once, and soon."""
        secret = secrets.token_urlsafe(32)
        with self._lock:
            self._links[digest_of(secret)] = (role, now + LINK_SECONDS)
        return secret

    def log_in(self, secret: str, now: float) -> tuple[str, float] | None:
        """Begin a session by a token or a link. Returns its secret and its end, or None."""
        with self._lock:
            role, until = self._links.pop(digest_of(secret), (Role.READER, 0.0))
        caller = None if until > now else self.by_secret(secret, now)
        if until <= now and caller is None:
            return None
        expires = now + SESSION_SECONDS
        if caller is not None:
            expires, role = min(expires, caller.expires or expires), caller.role
        session = Session(token="" if caller is None else digest_of(secret), role=role, expires=expires)
        made = secrets.token_urlsafe(32)
        with self._lock:
            kept = {key: one for key, one in self._sessions.items() if one.expires > now}
            same = [key for key, one in kept.items() if one.token == session.token]
            for key in same[: max(0, len(same) - _MOST_SESSIONS + 1)]:
                del kept[key]
            self._sessions = {**kept, digest_of(made): session}
            self._save()
        return made, expires

    def log_out(self, secret: str) -> None:
        """End a session."""
        with self._lock:
            gone = digest_of(secret)
            self._sessions = {key: one for key, one in self._sessions.items() if key != gone}
            self._save()

    def _by_digest(self, digest: str, now: float) -> Caller | None:
        found = None
        for token in self._tokens:  # all of them, so that the time tells nothing
            if hmac.compare_digest(token.digest, digest):
                found = token
        if found is None or (found.expires is not None and found.expires <= now):
            return None
        return Caller(name=found.name, role=found.role, runs=found.runs, expires=found.expires)

    def _save(self) -> None:
        if self._sessions_path:
            try:
                replace_file(self._sessions_path, msgspec.json.encode(self._sessions))
            except OSError as error:
                log("sessions_not_kept", level="warning", reason=error.strerror)


def _load(path: str) -> dict[str, Session]:
    """Return the sessions that an earlier daemon left. What cannot be read is none."""
    with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeError), open(path, "rb") as file:
        return msgspec.json.decode(file.read(_LARGEST), type=dict[str, Session])
    return {}


def stamp_of(path: str) -> object:
    """Return something that differs after a file was written again."""
    try:
        found = os.stat(path)
    except OSError as error:
        return error.errno
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
