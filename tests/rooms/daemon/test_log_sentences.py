"""Log lines for people: sentences on a terminal, JSON elsewhere, and either where it is asked for."""

from __future__ import annotations

import io
import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ckptguard_daemon import log as log_module
from ckptguard_daemon.log import log, start_logging
from ckptguard_daemon.log_sentences import _SENTENCES


class Terminal(io.StringIO):
    """What a terminal would show."""

    def isatty(self) -> bool:
        """It is one."""
        return True


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., io.StringIO]]:
    """Start logging in a form to a terminal, or not; returns what is written."""
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(logging.getLogger("ckptguard_daemon"), "handlers", [])  # a daemon of another test counts there
    monkeypatch.setattr(log_module.logging, "captureWarnings", lambda _: None)
    level = root.level

    def begin(form: str, *, terminal: bool) -> io.StringIO:
        out = Terminal() if terminal else io.StringIO()
        monkeypatch.setattr(log_module.sys, "stderr", out)
        start_logging(form=form)
        return out

    yield begin
    root.setLevel(level)


@pytest.mark.parametrize(
    ("form", "terminal", "is_json"),
    [("auto", True, False), ("auto", False, True), ("text", False, False), ("json", True, True)],
)
def test_the_form_follows_the_terminal_unless_told(
    logged: Callable[..., io.StringIO], form: str, terminal: bool, is_json: bool
) -> None:
    """A pipe gets JSON, a terminal sentences."""
    out = logged(form, terminal=terminal)
    log("gone", run="/r", path="net-1.pt")
    [line] = out.getvalue().splitlines()
    if is_json:
        assert json.loads(line)["path"] == "net-1.pt"
    else:
        assert line.endswith("  r/net-1.pt is gone")


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize("stream", ["its own", "another", "none"])
def test_the_journal_gets_each_line_with_its_priority(
    monkeypatch: pytest.MonkeyPatch, logged: Callable[..., io.StringIO], tmp_path: Path, form: str, stream: str
) -> None:
    """Only where stderr is the journal's own stream, and not one that it was led to. A traceback has several lines."""
    logged(form, terminal=False)
    with (tmp_path / "stderr").open("w") as out:
        found = os.fstat(out.fileno())
        streams = {"its own": f"{found.st_dev}:{found.st_ino}", "another": f"{found.st_dev}:{found.st_ino + 1}"}
        monkeypatch.delenv("JOURNAL_STREAM", raising=False)
        if stream in streams:
            monkeypatch.setenv("JOURNAL_STREAM", streams[stream])
        monkeypatch.setattr(log_module.sys, "stderr", out)
        start_logging(form=form)
        expected = []
        for level, priority in (("debug", 7), ("info", 6), ("warning", 4), ("error", 3), ("critical", 2)):
            logging.getLogger("ckptguard_daemon").setLevel(logging.DEBUG)
            try:
                raise ValueError(level)
            except ValueError:
                log("gone", level=level, trace=level == "error", path="net-1.pt")
            expected.append(f"<{priority}>" if stream == "its own" else "")
    lines = (tmp_path / "stderr").read_text().splitlines()
    begins = [re.match("(<[0-9]>)?", line)[0] for line in lines]  # type: ignore[index]
    more = len(lines) - len(expected)
    assert (more > 2) is (form == "text")
    assert begins == [*expected[:3], *[expected[3]] * (1 + more), expected[4]]
    assert all(json.loads(line[len(begin) :]) for line, begin in zip(lines, begins, strict=True) if form == "json")


def test_times_have_milliseconds(logged: Callable[..., io.StringIO], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the moment when it was logged."""
    monkeypatch.setattr(log_module.logging.time, "time", lambda: 1767268700.0625)
    monkeypatch.setattr(log_module.logging.time, "time_ns", lambda: 1767268700062500000, raising=False)
    out = logged("json", terminal=False)
    log("gone", path="net-1.pt")
    assert json.loads(out.getvalue())["time"] == "2026-01-01T11:58:20.062Z"
    out = logged("text", terminal=False)
    log("gone", path="net-1.pt")
    assert re.match(r"2026-01-0[12] \d\d:\d\d:20\.062  ", out.getvalue())


@pytest.mark.parametrize("run", ["/r", "s3://bucket/r"])
@pytest.mark.parametrize("path", ["/r/net-1.pt", "/home/me/.cache/ckptguard/view-1/net-1.pt", "s3://bucket/r/net-1.pt"])
def test_only_a_path_in_a_run_gets_its_name(logged: Callable[..., io.StringIO], run: str, path: str) -> None:
    """A full path, as of the links to a kept copy, and a URL stay as they are, whatever the run is."""
    out = logged("text", terminal=False)
    log("known_good", run=run, id="1.1", path=path)
    assert out.getvalue().endswith(f"  known-good is {path}\n")


def test_a_file_is_for_programs(tmp_path: Path, logged: Callable[..., io.StringIO]) -> None:
    """Also where the daemon runs on a terminal."""
    logged("auto", terminal=True)
    start_logging(str(tmp_path / "log"))
    log("gone", path="net-1.pt")
    for handler in logging.getLogger().handlers:
        handler.close()
    assert json.loads((tmp_path / "log").read_text())["event"] == "gone"


def test_verdicts_are_sentences(logged: Callable[..., io.StringIO]) -> None:
    """What, how it is, why, how much and how long; a warning says that it is one."""
    out = logged("text", terminal=False)
    log(
        "verified", run="s3://bucket/a/", path="net-1.pt", id="1.1", outcome="good", bytes=2048, seconds=0.25, reason=""
    )
    log("verified", level="warning", path="net-2.pt", id=None, outcome="bad", bytes=None, seconds=None, reason="w: NaN")
    log("known_good", id="-.4", path="/r/last.pt")
    log("known_good", level="warning", id=None, reason="there is none")
    said = [line.partition("  ")[2] for line in out.getvalue().splitlines()]
    assert said == [
        "a/net-1.pt is good (2.0 KiB in 0.2 s)",
        "warning: net-2.pt is bad: w: NaN (-)",
        "known-good is /r/last.pt (save 4)",
        "warning: nothing is known-good: there is none",
    ]


@pytest.mark.parametrize("event", [*sorted(_SENTENCES), "unheard_of", "verified", "known_good"])
def test_no_event_breaks_a_line(logged: Callable[..., io.StringIO], event: str) -> None:
    """Whatever fields it has or lacks, and whatever they hold, it is one line that says the event or its fields."""
    out = logged("text", terminal=False)
    log(event, path="a\nb\x1b[0m{reason}", reason="{x}\u202e", outcome="bad", inner={"k": [1]})
    lines = out.getvalue().splitlines()
    assert len(lines) == 1
    assert "\x1b" not in lines[0]
    assert "\u202e" not in lines[0]


def test_a_traceback_follows_its_line(logged: Callable[..., io.StringIO]) -> None:
    """Line by line, and nothing in it reaches the terminal raw."""
    out = logged("text", terminal=False)
    try:
        raise ValueError("x\x1b[0m")
    except ValueError:
        log("pass_failed", level="error", trace=True, run="/r")
    assert "error: pass failed: run /r\nTraceback" in out.getvalue()
    assert "\x1b" not in out.getvalue()


@pytest.mark.parametrize("link", [True, False])
def test_people_get_one_address_of_the_dashboard(logged: Callable[..., io.StringIO], link: bool) -> None:
    """With a link, which is printed, the address that asks for a token is not said. JSON has it."""
    fields = {"address": "127.0.0.1:1", "url": "http://127.0.0.1:1", "tls": False, "link": link}
    out = logged("text", terminal=True)
    log("http", **fields)
    assert ("http://" in out.getvalue()) is not link
    assert "dashboard" in out.getvalue()
