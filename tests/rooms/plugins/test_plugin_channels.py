"""Channels of others: what they are given, and what a failure costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.plugins import plant

from ckptguard.reporting import channels
from ckptguard.reporting.channels import NotDeliveredError, channels_of, require_apprise
from ckptguard.testing import ChannelContract
from ckptguard.values.settings import Settings

EVENT: dict[str, Any] = {"event": "test", "id": "1", "title": "a test", "text": "nothing"}
TO_FILE = """
def deliver(address, event):
    print("this must not be in the answer")
    with open(address.partition("://")[2], "a") as file:
        file.write(event["id"] + "\\n")
"""


class TestToFile(ChannelContract):
    """The contract, of a channel that writes into a file."""

    name = "file"

    @pytest.fixture(autouse=True)
    def _installed(self, tmp_path: Path, plugins: Path) -> None:
        plant(plugins, [("channels", "file.v1", "deliver")], TO_FILE)
        self.path = tmp_path / "events"

    def address(self) -> str:
        return f"plugin+file://{self.path}"

    def broken(self) -> str:
        return "plugin+file:///no such folder/events"

    def arrived(self) -> int:
        return len(self.path.read_text().splitlines()) if self.path.exists() else 0


@pytest.mark.parametrize(
    ("code", "again", "says"),
    [
        (
            "def deliver(address, event): raise OSError(f'cannot reach {address}')",
            True,
            "cannot reach plugin+pager://***",
        ),
        *(
            (f"def deliver(address, event): raise OSError('x' * {left} + address)", True, "xxx")
            for left in range(160, 200, 3)  # a message is cut here: within the address
        ),
        ("import time\ndef deliver(address, event): time.sleep(1000)", True, "took longer than 1 seconds"),
        ("import os\ndef deliver(address, event): os._exit(0)", True, "its process ended with 0"),
        ("def deliver(address, event): return 'sent'", True, "returned something else"),
    ],
)
def test_a_failure_is_said_without_the_secret(
    code: str, again: bool, says: str, plugins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that fails counts as delivered, and the address is in no message."""
    plant(plugins, [("channels", "pager.v1", "deliver")], code)
    monkeypatch.setattr(channels, "COMMAND_SECONDS", 1.0)
    settings = Settings(notify=("plugin+pager://s3cr3t-token",))
    require_apprise(settings)
    (channel,) = channels_of(settings)
    with pytest.raises(NotDeliveredError) as caught:
        channel.deliver(EVENT)
    assert (caught.value.again, says in str(caught.value)) == (again, True), str(caught.value)
    assert "s3cr3t" not in str(caught.value) + channel.shown


@pytest.mark.parametrize(
    ("point", "off", "says"),
    [
        ("pager.v1", True, "plugins are turned off"),
        ("pager.v2", False, "version 2 of the interface"),
        ("other.v1", False, "no package has a channel pager"),
    ],
)
def test_what_is_not_used_delivers_nothing(point: str, off: bool, says: str, plugins: Path) -> None:
    """The sentence says why, and it is not tried again."""
    plant(plugins, [("channels", point, "deliver")], "raise SystemExit('it was imported')")
    (channel,) = channels_of(Settings(notify=("plugin+pager://x",), no_plugins=off))
    with pytest.raises(NotDeliveredError, match=says) as caught:
        channel.deliver(EVENT)
    assert not caught.value.again
