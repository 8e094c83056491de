"""Logging in: tokens, sessions and links, how they end, and how often one may be wrong."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from ckptguard_daemon.http import callers, gate
from ckptguard_daemon.http.callers import LINK_SECONDS, SESSION_SECONDS, Callers
from ckptguard_daemon.http.gate import Attempts
from gate_calls import SECRETS, Behind, bearer
from hypothesis import given
from hypothesis import strategies as st

from ckptguard.errors import SettingsError
from ckptguard.runs.token_file import add_token, read_tokens
from ckptguard.values.access import Role, Token, digest_of, parse_tokens

NOW = 1_800_000_000.0


@pytest.fixture
def behind(tmp_path: Path) -> Behind:
    """The gate on loopback."""
    return Behind(tmp_path)


def status_of(behind: Behind, cookie: str) -> int:
    """What a session is told of itself."""
    return behind.ask("GET", "/v1/me", {"cookie": cookie}).status


def test_a_session_ends_when_it_is_ended(behind: Behind) -> None:
    """Logging out ends it at the daemon, not only in the browser."""
    cookie = behind.log_in(SECRETS[Role.READER])
    other = behind.log_in(SECRETS[Role.READER])
    assert status_of(behind, cookie) == 200
    answer = behind.ask("DELETE", "/v1/session", {"cookie": cookie, "origin": "http://127.0.0.1:8123"})
    assert answer.status == 200
    assert "max-age=0" in answer.headers["set-cookie"].lower()
    assert [status_of(behind, one) for one in (cookie, other)] == [401, 200]


def test_a_session_ends_with_its_token(behind: Behind) -> None:
    """A line that is removed locks out its sessions; one whose role changed changes them; a broken file all."""
    cookies = {role: behind.log_in(SECRETS[role]) for role in Role}
    lines = behind.tokens.read_text().splitlines()
    behind.tokens.write_text("\n".join([*lines[1:2], lines[2].replace("operator", "reader", 2)]) + "\n")
    behind.callers.look()
    assert [status_of(behind, cookies[role]) for role in Role] == [401, 200, 200]
    me = json.loads(behind.ask("GET", "/v1/me", {"cookie": cookies[Role.OPERATOR]}).body)
    assert me["role"] == "reader"
    behind.tokens.write_text("nonsense")
    behind.callers.look()
    assert [status_of(behind, cookies[role]) for role in Role] == [401] * 3
    assert behind.ask("GET", "/v1/me", bearer(SECRETS[Role.GUARD])).status == 401
    behind.tokens.unlink()
    behind.callers.look()
    assert behind.ask("GET", "/v1/me", bearer(SECRETS[Role.GUARD])).status == 401
    behind.tokens.touch(0o600)
    behind.tokens.write_text("\n".join(lines))
    behind.callers.look()
    assert [status_of(behind, cookies[role]) for role in Role] == [200] * 3


def test_times_end_tokens_and_sessions(tmp_path: Path) -> None:
    """A token, its session, a session and a link are each good until their time, and not at it."""
    path = tmp_path / "tokens"
    token, secret = add_token(str(path), Token(name="a", role=Role.GUARD, digest="", expires=NOW + 1000))
    found = Callers(str(path), Role.OPERATOR)
    made = found.log_in(secret, NOW)
    assert made is not None
    assert made[1] == token.expires
    assert found.by_session(made[0], NOW + 999) == found.by_secret(secret, NOW + 999) is not None
    assert found.by_session(made[0], NOW + 1000) is None
    assert found.by_secret(secret, NOW + 1000) is None
    assert found.log_in(secret, NOW + 1000) is None
    link = found.new_link(Role.READER, NOW)
    made = found.log_in(link, NOW + LINK_SECONDS - 1)
    assert made is not None
    last = NOW + LINK_SECONDS - 1 + SESSION_SECONDS
    assert found.by_session(made[0], last - 1) is not None
    assert found.by_session(made[0], last) is None
    assert found.log_in(found.new_link(Role.READER, NOW), NOW + LINK_SECONDS) is None


def test_a_link_works_once(behind: Behind) -> None:
    """Its replay is refused; looking at its address uses nothing up; it is no token."""
    link = behind.callers.new_link(Role.OPERATOR, 4e9)
    assert behind.ask("GET", "/v1/me", bearer(link)).status == 401
    assert behind.ask("GET", f"/login?{link}").status == 200
    cookie = behind.log_in(link)
    me = json.loads(behind.ask("GET", "/v1/me", {"cookie": cookie}).body)
    assert (me["name"], me["role"]) == ("owner", "operator")
    replay = behind.ask("POST", "/v1/session", body=b'{"token": "%s"}' % link.encode())
    assert replay.status == 401
    assert "set-cookie" not in replay.headers
    assert link.encode() not in replay.body


def test_sessions_survive_a_restart_without_secrets(tmp_path: Path, behind: Behind) -> None:
    """Their file is private and holds digests only; one that is damaged holds no session."""
    path = tmp_path / "it.sessions"
    behind.callers.remember(str(path))
    cookie = behind.log_in(SECRETS[Role.READER])
    secret = cookie.partition("=")[2]
    assert secret not in path.read_text()
    assert path.stat().st_mode & 0o077 == 0
    again = Callers(str(behind.tokens))
    again.remember(str(path))
    assert again.by_session(secret, 0.0) is not None
    for damaged in (b"", b"[]", b'{"a": 1}', b"\xff\xfe", path.read_bytes()[:-1]):
        path.write_bytes(damaged)
        again.remember(str(path))
        assert again.by_session(secret, 0.0) is None


def test_an_earlier_link_gives_no_more_than_one_now(tmp_path: Path, behind: Behind) -> None:
    """After a restart that lets links only read, or has none, an earlier operator is one no more."""
    path = str(tmp_path / "it.sessions")
    behind.callers.remember(path)
    secret = behind.log_in(behind.callers.new_link(Role.OPERATOR, 4e9)).partition("=")[2]
    roles = []
    for links in (Role.OPERATOR, Role.READER, None):
        again = Callers(str(behind.tokens), links)
        again.remember(path)
        caller = again.by_session(secret, 0.0)
        roles.append(caller and caller.role)
    assert roles == [Role.OPERATOR, Role.READER, None]


def test_a_token_has_so_many_sessions(behind: Behind, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest of the same token ends; nobody ends those of others."""
    monkeypatch.setattr(callers, "_MOST_SESSIONS", 3)
    other = behind.log_in(SECRETS[Role.OPERATOR])
    made = [behind.log_in(SECRETS[Role.READER]) for _ in range(5)]
    assert [status_of(behind, one) for one in made] == [401, 401, 200, 200, 200]
    assert status_of(behind, other) == 200


def test_odd_cookies_of_others_do_no_harm(behind: Behind) -> None:
    """Browsers send the cookies of every port of a host, whatever is in them."""
    cookie = behind.log_in(SECRETS[Role.READER])
    for odd in ('a={"x": [1]}', "b", "=", "ckptguard-1=x", 'c="', "d=\x80", ";;"):
        assert status_of(behind, f"{odd}; {cookie}; {odd}") == 200


WRONG_BODIES = (b"", b"{}", b"[]", b'{"token": 1}', b'{"token": null}', b"\xff", b'{"token": "' + b"x" * 2000 + b'"}')


@pytest.mark.parametrize("body", WRONG_BODIES)
def test_a_login_that_makes_no_sense(behind: Behind, body: bytes) -> None:
    """It gets one sentence and no session."""
    answer = behind.ask("POST", "/v1/session", body=body)
    assert answer.status == 400
    assert json.loads(answer.body)["error"]["message"]


def test_wrong_tokens_are_limited(behind: Behind) -> None:
    """100 of them from one address end in 429, by either way in, even a right one; sessions and others go on."""
    cookie = behind.log_in(SECRETS[Role.READER])
    statuses = [behind.ask("GET", "/v1/me", bearer(f"guess-{n}"), address="192.0.2.200").status for n in range(100)]
    assert statuses[0] == 401
    assert statuses[-1] == 429
    body = b'{"token": "%s"}' % SECRETS[Role.READER].encode()
    answer = behind.ask("POST", "/v1/session", body=body, address="192.0.2.200")
    assert answer.status == 429
    assert int(answer.headers["retry-after"]) > 0
    assert behind.ask("GET", "/v1/me", {"cookie": cookie}, address="192.0.2.200").status == 200
    assert behind.ask("GET", "/v1/me", bearer(SECRETS[Role.READER])).status == 200


def test_wrong_tokens_lock_out_no_program_that_works(behind: Behind) -> None:
    """Behind a proxy everybody has one address: whose token came in from there before does not wait for others."""
    reader, guard = bearer(SECRETS[Role.READER]), bearer(SECRETS[Role.GUARD])
    assert behind.ask("GET", "/v1/me", reader, address="127.0.0.1").status == 200
    statuses = [behind.ask("GET", "/v1/me", bearer(f"guess-{n}"), address="127.0.0.1").status for n in range(100)]
    assert statuses[-1] == 429
    assert behind.ask("GET", "/v1/me", reader, address="127.0.0.1").status == 200
    assert behind.ask("GET", "/v1/me", guard, address="127.0.0.1").status == 429
    behind.tokens.write_text("")
    behind.callers.look()
    assert behind.ask("GET", "/v1/me", reader, address="127.0.0.1").status == 401


def test_a_program_with_an_expired_token_locks_nobody_out(behind: Behind) -> None:
    """It is refused each time, and guesses nothing: others at its address are let in. It is again, once it is right."""
    tokens, address = behind.tokens.read_text(), "192.0.2.200"
    behind.tokens.write_text("".join(line for line in tokens.splitlines(True) if " guard " not in line))
    behind.callers.look()
    asked = [behind.ask("GET", "/v1/me", bearer(SECRETS[Role.GUARD]), address=address).status for _ in range(100)]
    assert set(asked) == {401}
    assert behind.ask("GET", "/v1/me", bearer(SECRETS[Role.READER]), address=address).status == 200
    behind.tokens.write_text(tokens)
    behind.callers.look()
    assert behind.ask("GET", "/v1/me", bearer(SECRETS[Role.GUARD]), address=address).status == 200


TRIES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60), st.floats(0, 5)), max_size=300)


@given(TRIES)
def test_tries_are_bounded(tries: list[tuple[int, int, float]]) -> None:
    """Within its time an address can try so many different secrets and no more; a wait is never longer than that."""
    limited, now = Attempts(), 1000.0
    tried: list[tuple[int, int, float]] = []
    for who, secret, pause in tries:
        now += pause
        wait = limited.wait(f"192.0.2.{who}", str(secret), now)
        assert 0.0 <= wait <= gate.SECONDS
        if not wait:
            limited.was_wrong(f"192.0.2.{who}", str(secret), now)
            tried.append((who, secret, now))
    for who, _, begin in tried:
        within = {secret for one, secret, at in tried if one == who and begin <= at < begin + gate.SECONDS}
        before = {secret for one, secret, at in tried if one == who and begin - gate.SECONDS < at < begin}
        assert len(within - before) <= gate.MOST


def test_many_addresses_are_bounded_in_memory() -> None:
    """A guesser with many addresses makes the daemon remember no more, and locks nobody out."""
    limited = Attempts()
    for n in range(10_000):
        limited.was_wrong(f"2001:db8:{n:x}::1", "wrong", 1000.0)
    assert limited.wait("192.0.2.1", "right", 1000.0) == 0
    assert len(limited._wrong) <= gate._MOST_ADDRESSES


def test_one_network_is_one_guesser() -> None:
    """Whoever has a network of IPv6 gets no more tries than one address."""
    limited, free = Attempts(), 0
    for n in range(1000):
        if limited.wait(f"2001:db8::{n:x}", str(n), 1000.0) == 0:
            limited.was_wrong(f"2001:db8::{n:x}", str(n), 1000.0)
            free += 1
    assert free == gate.MOST


NAMES = st.from_regex(r"[A-Za-z0-9._@+-]{1,64}", fullmatch=True)
PATTERNS = st.from_regex(r"[!-+\--~]{1,20}", fullmatch=True)
TOKENS = st.builds(
    Token,
    name=NAMES,
    role=st.sampled_from(Role),
    digest=st.binary(min_size=32, max_size=32).map(bytes.hex),
    runs=st.none() | st.lists(PATTERNS, min_size=1, max_size=5).map(tuple),
    expires=st.none() | st.integers(0, 2**33).map(float),
)


@given(st.lists(TOKENS, unique_by=(lambda t: t.name, lambda t: t.digest), max_size=4))
def test_a_line_says_all_of_a_token(tokens: list[Token]) -> None:
    """What is written is what is read."""
    assert parse_tokens("# ours\n\n" + "\n".join(token.line for token in tokens)) == tuple(tokens)


WRONG_LINES = (
    "alice",
    "alice reader",
    f"alice king {'0' * 64}",
    f"alice reader {'0' * 63}",
    f"alice reader {'G' * 64}",
    f"a/b reader {'0' * 64}",
    f"alice reader {'0' * 64} runs=",
    f"alice reader {'0' * 64} runs=a,,b",
    f"alice reader {'0' * 64} expires=soon",
    f"alice reader {'0' * 64} expires=2027-01-01 expires=2028-01-01",
    f"alice reader {'0' * 64} role=operator",
    f"alice reader {'0' * 64}\nalice reader {'1' * 64}",
    f"alice reader {'0' * 64}\nbob operator {'0' * 64}",
)


@pytest.mark.parametrize("text", WRONG_LINES)
def test_a_wrong_line_is_named(tmp_path: Path, text: str) -> None:
    """One sentence with the file and the line, and no digest in it."""
    path = tmp_path / "tokens"
    path.touch(0o600)
    path.write_text(text)
    with pytest.raises(SettingsError, match=r"tokens, line [12]: ") as caught:
        read_tokens(str(path))
    assert "0" * 20 not in str(caught.value)


@given(st.binary(max_size=200))
def test_any_bytes_are_tokens_or_a_sentence(tmp_path_factory: pytest.TempPathFactory, text: bytes) -> None:
    """A file of anything at all is read, or refused in one sentence."""
    path = tmp_path_factory.mktemp("any") / "tokens"
    path.touch(0o600)
    path.write_bytes(text)
    said = str(path)
    with contextlib.suppress(SettingsError):
        said = "".join(token.name for token in read_tokens(str(path)))
    assert said.isprintable()


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660, 0o602])
def test_a_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    """Also one that they can only write; and a folder is no file."""
    path = tmp_path / "tokens"
    path.write_text(f"alice reader {digest_of('x')}\n")
    path.chmod(mode)
    with pytest.raises(SettingsError, match="other users can read or change"):
        read_tokens(str(path))
    with pytest.raises(SettingsError):
        read_tokens(str(tmp_path))


def test_a_new_token_keeps_the_file(tmp_path: Path) -> None:
    """Lines stay, also one without an end; a name is taken once; the secret is in no file."""
    path = tmp_path / "tokens"
    path.touch(0o600)
    path.write_text(f"# ours\nalice operator {digest_of('x')}")
    token, secret = add_token(str(path), Token(name="bob", role=Role.READER, digest=""))
    assert [one.name for one in read_tokens(str(path))] == ["alice", "bob"]
    assert token.digest == digest_of(secret)
    assert secret not in path.read_text()
    with pytest.raises(SettingsError, match="has a token bob"):
        add_token(str(path), Token(name="bob", role=Role.OPERATOR, digest=""))
    assert path.stat().st_mode & 0o777 == 0o600
