"""Prometheus, with rules and one target."""

from __future__ import annotations

import contextlib
import json
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from servers.processes import free_port, needed, running


@dataclass(frozen=True)
class PrometheusServer:
    """A running server."""

    url: str

    def ask(self, path: str, **query: str) -> Any:
        """The data of one answer of its API; an error if it says that something is wrong."""
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=30) as answer:
            document = json.loads(answer.read())
        assert document["status"] == "success", document
        return document["data"]

    def value(self, expression: str) -> float | None:
        """The value of an expression that has at most one."""
        found = self.ask("query", query=expression)["result"]
        assert len(found) <= 1, found
        return float(found[0]["value"][1]) if found else None


def promtool() -> str:
    """The path of promtool. Raises NotInstalledError."""
    return needed("promtool", package="prometheus")[0]


@contextlib.contextmanager
def prometheus(folder: Path, scrape: dict[str, Any], rules: Path) -> Iterator[PrometheusServer]:
    """A server that scrapes one job every second."""
    program, port = needed("prometheus", package="prometheus")[0], free_port()
    job = {"job_name": "ckptguard", **scrape}
    every = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config = folder / "prometheus.yml"  # JSON is YAML
    config.write_text(json.dumps({"global": every, "rule_files": [str(rules)], "scrape_configs": [job]}))
    server = PrometheusServer(f"http://127.0.0.1:{port}")

    def ready() -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{server.url}/-/ready", timeout=5) as answer:
            return bool(answer.status == 200)
        return False

    command = [program, "--config.file", str(config), "--storage.tsdb.path", str(folder / "data")]
    with running([*command, f"--web.listen-address=127.0.0.1:{port}"], folder / "prometheus.log", ready, cwd=folder):
        yield server
