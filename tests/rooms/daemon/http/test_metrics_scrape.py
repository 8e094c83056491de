"""A real daemon's metrics: asked by its socket, by TCP, from a file, and by a real Prometheus."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import stat
from pathlib import Path

import pytest
from ckptguard_daemon.command import command
from ckptguard_daemon.metrics_outlets import listen_for_scrapers
from ckptguard_daemon.plan import ListenOptions
from click.testing import CliRunner
from servers.processes import free_port
from servers.prometheus import prometheus
from support.daemon_process import PATIENCE, DaemonProcess, Starter, printed, save, until

from ckptguard.errors import SettingsError

TOKEN = "correct-horse-battery-staple"


def scrape(address: str, path: str = "/metrics", method: str = "GET", **headers: str) -> tuple[int, str]:
    """(status, text) of one request over TCP."""
    connection = http.client.HTTPConnection(address, timeout=PATIENCE)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def address_of(daemon: DaemonProcess) -> str:
    """Where the daemon says that it listens."""
    return str(daemon.logged("metrics")["address"])


def series(text: str, name: str) -> list[str]:
    """The lines of one metric."""
    return re.findall(rf"^ckptguard_{name}(?:\{{.*\}})? .*$", text, re.MULTILINE)


@pytest.fixture
def token(tmp_path: Path) -> Path:
    """A file with a token."""
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o600)
    return path


def test_the_socket_and_the_port_tell_of_the_same_run(start: Starter, run: Path) -> None:
    """The first verdict is there; the port has the metrics and nothing else. One may ask by any address of this
    machine, and by no other name: a web page learns nothing."""
    save(run, 1)
    daemon = start(run, arguments=("--metrics", "127.0.0.2:0"))
    daemon.known_good(1)
    address = address_of(daemon)

    def shown() -> str | None:
        status, text = scrape(address)
        return text if status == 200 and 'outcome="good"' in text else None

    text = until(shown, "a verdict among the metrics")
    assert series(text, "verdicts_total") == [f'ckptguard_verdicts_total{{run="{run}",outcome="good"}} 1.0']
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(daemon.address)
    connection.request("GET", "/metrics")
    answer = connection.getresponse()
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert series(answer.read().decode(), "verdicts_total") == series(text, "verdicts_total")
    connection.close()
    assert scrape(address, "/v1/runs")[0] == 404
    assert scrape(address, method="POST")[0] == 405
    for host in (address, "localhost", "LOCALHOST:1", "[::1]", "[::1]:9469", "127.0.0.1"):
        assert scrape(address, Host=host)[0] == 200
    foreign = ["evil.example", "", "127.0.0.1.evil.example", "192.0.2.1", "localhost.evil.example:1", "[192.0.2.1]"]
    for headers in ({"Origin": "http://localhost"}, *({"Host": host} for host in (*foreign, "::", ":", "[]"))):
        status, text = scrape(address, **headers)
        assert (status, "ckptguard_" in text) == (403, False)


def test_a_token_is_needed_where_there_is_one(start: Starter, run: Path, token: Path) -> None:
    """Any name of the machine does then. A token that was replaced counts at once, and one that got lost lets nobody
    in."""
    daemon = start(run, arguments=("--metrics", "0.0.0.0:0", "--metrics-token", str(token)))
    address = f"127.0.0.1:{address_of(daemon).rpartition(':')[2]}"
    assert scrape(address)[0] == 401
    assert scrape(address, Authorization="Bearer wrong")[0] == 401
    assert scrape(address, Authorization="Bearer w\xfcrong")[0] == 401
    assert scrape(address, Host="node7:9469", Authorization=f"Bearer {TOKEN}")[0] == 200
    token.write_text("another-secret-of-ours")
    assert scrape(address, Authorization=f"Bearer {TOKEN}")[0] == 401
    assert scrape(address, Authorization="Bearer another-secret-of-ours")[0] == 200
    token.chmod(0o644)
    assert scrape(address, Authorization="Bearer another-secret-of-ours")[0] == 503
    assert scrape(address)[0] == 503
    assert [line["event"] for line in daemon.log_lines()].count("metrics_refused") == 1
    assert "another-secret" not in Path(f"/proc/{daemon.process.pid}/cmdline").read_text()
    assert "another-secret" not in daemon.log_path.read_text()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"metrics": "0.0.0.0:0"}, "other machines could read the metrics at 0.0.0.0:0"),
        ({"metrics": "[::]:0"}, "other machines could read the metrics"),
        ({"metrics": ":9469"}, "is not HOST:PORT"),
        ({"metrics": "127.0.0.1"}, "is not HOST:PORT"),
        ({"metrics": "127.0.0.1:99999"}, "is not HOST:PORT"),
        ({"metrics": "127.0.0.1:\u0661"}, "is not HOST:PORT"),
        ({"metrics": "no such host:1"}, "there is no address"),
        ({"metrics": f"{'a' * 300}:1"}, "there is no address"),
        ({"metrics": "192.0.2.1:1", "metrics_token": "TOKEN"}, "cannot listen at 192.0.2.1:1"),
        ({"metrics": "127.0.0.1:0", "metrics_token": "/none"}, "the token in /none cannot be read"),
        ({"metrics": "127.0.0.1:0", "metrics_token": "/dev/null"}, "every user can read"),
        ({"metrics": "127.0.0.1:0", "metrics_token": "EMPTY"}, "holds no token"),
        ({"metrics_token": "TOKEN"}, "is only for --metrics"),
    ],
)
def test_a_wrong_address_is_one_sentence(token: Path, options: dict[str, str], said: str) -> None:
    """Before anything is watched."""
    empty = token.with_name("empty")
    empty.touch(mode=0o600)
    places = {"TOKEN": str(token), "EMPTY": str(empty)}
    with pytest.raises(SettingsError) as caught:
        listen_for_scrapers(ListenOptions(**{name: places.get(a, a) for name, a in options.items()}))
    assert said in caught.value.message


def test_a_mistake_is_exit_code_2(run: Path) -> None:
    """Said by the command, for `--once` too, which has no time to be asked."""
    for arguments in (["--metrics", "0.0.0.0:0"], ["--once", "--metrics", "127.0.0.1:0"], ["--metrics-file", "m.txt"]):
        done = CliRunner().invoke(command, [str(run), *arguments])
        assert (done.exit_code, "Traceback" in done.output) == (2, False), done.output
        assert done.output.startswith("error: ")


def test_the_file_is_always_whole_and_readable_by_all(start: Starter, run: Path, tmp_path: Path) -> None:
    """The collector is another user. A daemon that stops leaves its last word, and nothing else."""
    folder = tmp_path / "textfile"
    folder.mkdir()
    place = folder / "ckptguard.prom"
    save(run, 1)
    before = os.umask(0o077)
    try:
        daemon = start(run, arguments=("--metrics-file", str(place)))
    finally:
        os.umask(before)
    until(place.exists, "the file")
    assert series(place.read_text(), "loop_timestamp_seconds")
    daemon.known_good(1)
    assert daemon.stop() == 0
    text = place.read_text()
    assert text.endswith("\n")
    assert series(text, "verdicts_total")
    assert stat.S_IMODE(place.stat().st_mode) == 0o644
    assert list(folder.iterdir()) == [place]


def test_a_file_that_cannot_be_written_ends_nothing(start: Starter, run: Path, tmp_path: Path) -> None:
    """It is said once, and the verdicts come."""
    place = tmp_path / "ckptguard.prom"
    place.mkdir()
    save(run, 1)
    daemon = start(run, arguments=("--metrics-file", str(place)))
    daemon.logged("metrics_not_written")
    daemon.known_good(1)
    assert list(tmp_path.glob(".ckptguard-*")) == []


def test_a_pass_for_a_job_leaves_its_file(start: Starter, run: Path, tmp_path: Path) -> None:
    """With `--once`: the runs, and nothing that the file of another job on the node could have too."""
    save(run, 1, nan=True)
    place = tmp_path / "job-1.prom"
    daemon = start(run, arguments=("--once", "--metrics-file", str(place)))
    assert daemon.process.wait(timeout=PATIENCE) == 3
    text = place.read_text()
    assert series(text, "newest_bad") == [f'ckptguard_newest_bad{{run="{run}"}} 1.0']
    assert series(text, "loop_timestamp_seconds") == []


def test_a_real_prometheus_scrapes_and_alerts(
    promtool: str, start: Starter, run: Path, tmp_path: Path, token: Path
) -> None:
    """The target is up, an alert fires for a bad save, and every panel of the dashboard is answered."""
    save(run, 1)
    save(run, 2, nan=True)
    address = f"127.0.0.1:{free_port()}"
    daemon = start(run, arguments=("--metrics", address, "--metrics-token", str(token)))
    assert daemon.outcome(2) == "bad"
    rules = tmp_path / "rules.yml"
    rules.write_text(printed("rules"))
    target = {
        "static_configs": [{"targets": [address]}],
        "authorization": {"credentials_file": str(token)},
    }
    with prometheus(tmp_path, target, rules) as server:
        until(lambda: server.value('up{job="ckptguard"}') == 1, "a scrape")

        def alert() -> dict[str, dict[str, str]] | None:
            found = server.ask("alerts")["alerts"]
            return next(
                (a for a in found if a["labels"]["alertname"] == "CkptguardBad" and a["state"] == "firing"), None
            )

        fired = until(alert, "the alert")
        assert fired["labels"]["run"] == str(run)
        assert fired["annotations"]["summary"] == f"the newest save of {run} is bad"
        assert [r for g in server.ask("rules")["groups"] for r in g["rules"] if r["health"] != "ok"] == []
        dashboard = json.loads(printed("grafana"))
        for panel in dashboard["panels"]:
            for asked in panel["targets"]:
                expression = asked["expr"].replace("$run", ".*").replace("$__rate_interval", "1m")
                found = server.ask("query", query=expression)["result"]
                # It was watched for a moment, and nothing is wrong but the save; nothing trains.
                may_be_empty = re.search(r"> 0\)?$|\[|training == 1", expression)
                assert found or may_be_empty, expression
    assert daemon.stop() == 0
