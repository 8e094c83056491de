"""``ckptguard notify``: who is told, and whether a message arrives."""

import importlib.util
import json

import pytest
from support.web_listener import listening

from ckptguard.reporting import channels


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def test_it_says_for_each_address_whether_it_arrived(invoke, monkeypatch, tmp_path):
    """Delivered is 0; one that failed is 1, and it says why."""
    with listening() as web:
        monkeypatch.setenv("CKPTGUARD_WEBHOOK", web.url)
        answer = invoke("notify", "--test")
        assert (answer.exit_code, "delivered" in answer.output) == (0, True)
        assert web.posted[0]["event"] == "test"
        monkeypatch.setenv("CKPTGUARD_ON_INCIDENT", '["sh", "-c", "exit 7"]')
        answer = invoke("notify", "--test")
        assert (answer.exit_code, "exit code 7" in answer.output, "delivered" in answer.output) == (1, True, True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what apprise's services import
@pytest.mark.skipif(importlib.util.find_spec("apprise") is None, reason="apprise is not installed")
def test_addresses_come_from_a_file_or_the_environment(invoke, monkeypatch, tmp_path, root, run):
    """Neither is in a process list; the message names the run."""
    with listening() as web:
        (tmp_path / "ckptguard.toml").write_text(f"notify = {json.dumps(web.address)}\n")
        answer = invoke("notify", "--test", root)
        assert (answer.exit_code, str(root) in web.posted[0]["message"]) == (0, True)
        assert "s3cr3t" not in answer.output
        monkeypatch.setenv("CKPTGUARD_NOTIFY", f"{web.address},nosuch://x")
        answer = invoke("notify", "--test", "--json")
        assert (answer.exit_code, [c["delivered"] for c in json.loads(answer.stdout)["channels"]]) == (1, [True, False])


def test_without_test_nothing_is_sent(invoke, monkeypatch):
    """It shows who would be told."""
    with listening() as web:
        monkeypatch.setenv("CKPTGUARD_WEBHOOK", web.url)
        answer = invoke("notify")
    assert (answer.exit_code, web.posted) == (0, [])
    assert "http://***" in answer.output


def test_nobody_to_tell_is_wrong_usage(invoke, tmp_path):
    """One sentence says what to set; a run that is not there has its own code."""
    answer = invoke("notify", "--test")
    assert (answer.exit_code, "CKPTGUARD_NOTIFY" in answer.stderr) == (2, True)


def test_a_missing_package_is_one_sentence(invoke, monkeypatch):
    """How to install it, and nothing is tried."""
    monkeypatch.setenv("CKPTGUARD_NOTIFY", "slack://a/b/c")
    monkeypatch.setattr(channels.importlib.util, "find_spec", lambda name: None)
    answer = invoke("notify", "--test")
    assert (answer.exit_code, len(answer.stderr.splitlines())) == (2, 2)
    assert 'pip install "ckptguard[notify]"' in answer.stderr


def test_an_address_that_an_error_quotes_stays_hidden(invoke, monkeypatch):
    """An error writes a control character as an escape."""
    monkeypatch.setenv("CKPTGUARD_WEBHOOK", "https://127.0.0.1/s3c\tr3t")
    answer = invoke("notify", "--test")
    assert answer.exit_code == 1
    assert "control characters" in answer.output
    assert "r3t" not in answer.output
