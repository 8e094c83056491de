"""The gate by TCP: what is refused, against a model of its own; what a token for some runs can learn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ckptguard_daemon.dashboard.verbs import VERBS
from gate_calls import LIMITED, PORT, SECRETS, Behind, bearer
from hypothesis import given, settings
from hypothesis import strategies as st
from support.http_documents import assert_like, example

from ckptguard.values.access import Role

OWN_HOSTS = (f"127.0.0.1:{PORT}", f"localhost:{PORT}", "localhost", "LOCALHOST:9", "[::1]:9", "127.9.9.9")
FOREIGN_HOSTS = (
    "",
    "evil.example",
    f"evil.example:{PORT}",
    "127.0.0.1.evil.example",
    "localhost.evil.example:1",
    "192.0.2.7",
    "localhost:1:2",
    "user@localhost",
    "localhost/",
    "[::1",
    "[2001:db8::1]",
    "1",
    "127.1",
    "2130706433",
    "localhost\x80",
)
# Each path, the role that it needs (None: none), and its methods.
PATHS: dict[str, tuple[Role | None, tuple[str, ...]]] = {
    "/": (None, ("GET", "HEAD")),
    "/login": (None, ("GET", "HEAD")),
    "/page/login.js": (None, ("GET", "HEAD")),
    "/v1/me": (Role.READER, ("GET", "HEAD")),
    "/v1/runs": (Role.READER, ("GET", "HEAD")),
    "/healthz": (Role.READER, ("GET", "HEAD")),
    "/v1/runs/SHOWN/verify": (Role.GUARD, ("POST",)),
}


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> Behind:
    """The gate on loopback."""
    return Behind(tmp_path_factory.mktemp("gate"))


@pytest.fixture(scope="module")
def cookies(behind: Behind) -> dict[Role, str]:
    """A session of each role."""
    return {role: behind.log_in(SECRETS[role]) for role in Role}


def expected(case: dict[str, object]) -> int:
    """The status that the rules of the guide give, by themselves."""
    host, origin, method, path = (str(case[key]) for key in ("host", "origin", "method", "path"))
    if host not in OWN_HOSTS or (case["origin"] is not None and origin.lower() != f"http://{host.lower()}"):
        return 403
    followed = case["mode"] == ("navigate", "document") and method in ("GET", "HEAD")
    if case["site"] in ("cross-site", "same-site") and not followed:
        return 403
    role = case["bearer"]
    if role == "wrong":
        return 401
    if role is None:
        role = case["cookie"] if isinstance(case["cookie"], Role) else None
        if role is not None and method not in ("GET", "HEAD") and case["origin"] is None:
            return 403
    if path not in PATHS:
        return 405 if path.startswith("/page/") and method not in ("GET", "HEAD") else 404
    needed, methods = PATHS[path]
    if needed is not None and role is None:
        return 401
    if needed is not None and isinstance(role, Role) and role < needed:
        return 403
    if method not in methods:
        return 405
    return 202 if path.endswith("verify") else 200


CASES = st.fixed_dictionaries(
    {
        "host": st.sampled_from((*OWN_HOSTS * 3, *FOREIGN_HOSTS)),
        "origin": st.sampled_from((None, None, "own", "own", "null", "http://evil.example", "https-own", "other-port")),
        "site": st.sampled_from((None, "same-origin", "none", "same-site", "cross-site")),
        "mode": st.sampled_from((None, ("navigate", "document"), ("navigate", "iframe"), ("cors", "empty"))),
        "bearer": st.sampled_from((None, None, "wrong", *Role)),
        "cookie": st.sampled_from((None, "wrong", "garbled", *Role)),
        "method": st.sampled_from(("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS")),
        "path": st.sampled_from((*PATHS, "/nothing", "/v1/", "/page/nothing.js", "/page/../guarded.py")),
    }
)


@settings(max_examples=600, deadline=None)
@given(CASES)
def test_the_gate_is_its_model(behind: Behind, cookies: dict[Role, str], case: dict[str, object]) -> None:
    """Any combination of Host, Origin, cookie, token, role, method and path gets the status that the model gives."""
    host = str(case["host"])
    origins = {"own": f"http://{host}", "https-own": f"https://{host}", "other-port": "http://127.0.0.1:1"}
    case = {**case, "origin": origins.get(str(case["origin"]), case["origin"])}
    headers = {"host": host}
    if case["origin"] is not None:
        headers["origin"] = str(case["origin"])
    if case["site"] is not None:
        headers["sec-fetch-site"] = str(case["site"])
    if isinstance(case["mode"], tuple):
        headers["sec-fetch-mode"], headers["sec-fetch-dest"] = case["mode"]
    if case["bearer"] is not None:
        role = case["bearer"]
        headers |= bearer(SECRETS[role] if isinstance(role, Role) else "nobody's")
    if case["cookie"] is not None:
        role, name = case["cookie"], behind.tcp_access.cookie
        texts = {"wrong": f"{name}=x", "garbled": f'{name}="\\'}
        headers["cookie"] = cookies[role] if isinstance(role, Role) else texts[str(role)]
    path = str(case["path"]).replace("SHOWN", behind.shown.run_id)
    answer = behind.ask(str(case["method"]), path, headers)
    assert answer.status == expected(case), (case, answer)
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert {"cross-origin-opener-policy", "referrer-policy", "cache-control"} <= answer.headers.keys()


def test_every_route_states_its_role(behind: Behind) -> None:
    """Without a caller every route of data refuses, whatever its methods; only the page and the login are for all."""
    open_to_all = {"/", "/login", "/favicon.ico", "/page/{name:path}"}
    for route in behind.routes:
        for method in route.methods or ():
            if route.role is None:
                assert route.path in open_to_all or (route.path, method) == ("/v1/session", "POST")
                continue
            path = route.path.replace("{run}", behind.shown.run_id).replace("{", "").replace("}", "")
            assert behind.ask(method, path).status == 401, (method, path)


def test_a_run_outside_a_tokens_patterns_does_not_exist(behind: Behind) -> None:
    """Each route says of a hidden run exactly what it says of one that is nowhere."""
    below = [route for route in behind.routes if "{run}" in route.path]
    assert len(below) > 10
    for route in below:
        for method in route.methods or ():
            said = []
            for run in (behind.hidden.run_id, "0123456789ab"):
                path = route.path.replace("{run}", run).replace("{", "").replace("}", "")
                answer = behind.ask(method, path, bearer(LIMITED), b"{}")
                said.append((answer.status, answer.body.replace(run.encode(), b"RUN")))
            assert said[0] == said[1]
            assert said[0][0] == 404, (method, route.path, said[0])


def test_a_hidden_run_is_in_no_list(behind: Behind) -> None:
    """No list that needs no run names it; of what cannot leave it out, the caller gets nothing."""
    lists = [route for route in behind.routes if "{" not in route.path and route.role]
    assert len(lists) > 5
    for route in lists:
        if route.stream or "GET" not in (route.methods or ()):
            continue
        for role, shown in ((LIMITED, False), (SECRETS[Role.OPERATOR], True)):
            answer = behind.ask("GET", route.path, bearer(role))
            names = (behind.hidden.run_id.encode(), behind.hidden.url.encode())
            assert shown or not any(name in answer.body for name in names), route.path
    assert behind.hidden.url.encode() in behind.ask("GET", "/v1/runs", bearer(SECRETS[Role.READER])).body
    assert behind.ask("GET", "/metrics", bearer(LIMITED)).status == 403


def test_me_says_what_may_be_done(behind: Behind) -> None:
    """The page asks once who it is; only an operator has actions."""
    for role in Role:
        me = json.loads(behind.ask("GET", "/v1/me", bearer(SECRETS[role])).body)
        assert (me["name"], me["role"], me["runs"], me["expires"]) == (role.word, role.word, None, None)
        assert set(me["actions"]) == (set(VERBS) if role is Role.OPERATOR else set())
    limited = behind.callers.by_secret(LIMITED, 0.0)
    assert limited is not None
    assert json.loads(behind.ask("GET", "/v1/me", bearer(LIMITED)).body)["runs"] == list(limited.runs or ())


def test_the_documents_are_as_shown(behind: Behind) -> None:
    """http.md shows them, key by key."""
    me = behind.ask("GET", "/v1/me", bearer(LIMITED))
    assert_like(json.loads(me.body), example("GET /v1/me"))
    begun = behind.ask("POST", "/v1/session", body=b'{"token": "%s"}' % LIMITED.encode())
    assert_like(json.loads(begun.body), example("POST /v1/session"))


def test_behind_a_proxy(tmp_path: Path) -> None:
    """The address that browsers see is one more name, with its own Origin; its cookie is for TLS alone."""
    behind = Behind(tmp_path, url="https://ckpt.example.org", secure=True)
    token = bearer(SECRETS[Role.GUARD])
    path = f"/v1/runs/{behind.shown.run_id}/verify"
    own = {"host": "ckpt.example.org", **token}
    assert behind.ask("POST", path, {**own, "origin": "https://ckpt.example.org"}).status == 202
    for origin in ("http://ckpt.example.org", "https://evil.example", "null"):
        assert behind.ask("POST", path, {**own, "origin": origin}).status == 403
    assert behind.ask("GET", "/v1/me", {**token, "host": "ckpt.example.org:1"}).status == 403
    answer = behind.ask("POST", "/v1/session", own, b'{"token": "%s"}' % SECRETS[Role.GUARD].encode())
    cookie = answer.headers["set-cookie"].lower()
    assert cookie.startswith("__host-ckptguard-")
    assert {"secure", "httponly", "samesite=strict", "path=/"} <= {part.strip() for part in cookie.split(";")}
    assert "domain" not in cookie


def test_beyond_this_machine_an_address_is_a_name(tmp_path: Path) -> None:
    """Nobody can make a number lead elsewhere; a foreign name stays foreign."""
    behind = Behind(tmp_path, beyond=True, secure=True)
    token = bearer(SECRETS[Role.READER])
    assert behind.ask("GET", "/v1/me", {**token, "host": "192.0.2.7:8123"}).status == 200
    assert behind.ask("GET", "/v1/me", {**token, "host": "evil.example:8123"}).status == 403
