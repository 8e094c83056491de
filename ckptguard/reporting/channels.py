"""How an event reaches people: a command, a webhook, or one of the many services that apprise knows.

An event reaches each channel at least once, and has an id by which a receiver knows it again.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib.util
import logging
import os
import re
import signal
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

import msgspec

from ckptguard.errors import SettingsError
from ckptguard.records.run import Run
from ckptguard.values.settings import Settings

COMMAND_SECONDS = 60.0
WEBHOOK_SECONDS = 10.0
_LONGEST_OUTPUT = 2000
_LONGEST_REASON = 300
_SHORTEST_SECRET = 4
_SLACK_HOSTS = ("https://hooks.slack.com/", "https://hooks.slack-gov.com/")
_BY_PLUGIN = "plugin+"
# What an HTTP server says that may be well a little later.
_PASSING = (408, 425, 429)

_commands: set[subprocess.Popen[bytes]] = set()  # that run now

Event = dict[str, Any]
Tell = Callable[[Run | None, Event], None]  # of the run that the event is about
Context = Callable[[], contextlib.AbstractContextManager[object]]


class NotDeliveredError(Exception):
    """An event did not reach a channel; `again`: it may at another try."""

    def __init__(self, reason: str, *, again: bool = False) -> None:
        super().__init__(reason)
        self.again = again


class Channel:
    """One way to people. `setting` named it, `shown` says where it leads without its secrets, and records know it by
    `key`."""

    def __init__(self, setting: str, address: str, shown: str) -> None:
        self.setting, self.shown = setting, shown
        # A new password is no new channel; and no hash of a password that people chose is left lying about.
        known = re.sub(r"(?<=://)([^/?#@]*?):[^/?#]*@", r"\1@", address)
        self.key = hashlib.blake2b(f"{setting}\0{known}".encode(errors="surrogateescape"), digest_size=6).hexdigest()

    def deliver(self, event: Event) -> dict[str, object]:
        """Hand over an event; what there is to say of it. NotDeliveredError."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Break off what is being delivered, where that is possible."""


class CommandChannel(Channel):
    """A command that reads the event from its stdin. It is started within `around_start`, for who holds signals
    back."""

    def __init__(self, argv: tuple[str, ...], around_start: Context) -> None:
        super().__init__("on_incident", "\0".join(argv), argv[0])
        self._argv, self._around_start = argv, around_start
        self._running: subprocess.Popen[bytes] | None = None
        self._starting = threading.Lock()

    @property
    def pids(self) -> list[int]:
        """The command, while it runs; also one that is being started now."""
        with self._starting:
            running = self._running
        return [] if running is None else [running.pid]

    def deliver(self, event: Event) -> dict[str, object]:
        """Run the command; how it ended. One that ran is not run again, whatever it says."""
        try:
            with self._starting, self._around_start():
                self._running = process = subprocess.Popen(
                    self._argv,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except (OSError, ValueError) as error:
            raise NotDeliveredError(f"it cannot be started: {error}") from error
        said: dict[str, object] = {}
        _commands.add(process)
        try:
            output, _ = process.communicate(msgspec.json.encode(event) + b"\n", timeout=COMMAND_SECONDS)
        except subprocess.TimeoutExpired:
            _kill_group(process)
            output, _ = process.communicate()
            said["killed_after_seconds"] = COMMAND_SECONDS
        finally:
            _commands.discard(process)
            self._running = None
        said |= {"exit_code": process.returncode, "output": output[-_LONGEST_OUTPUT:].decode("utf-8", "replace")}
        return said

    def abandon(self) -> None:
        """Kill the command and its children."""
        running = self._running
        if running is not None:
            _kill_group(running)


class WebhookChannel(Channel):
    """A web address that gets the event by POST: as JSON, or as a message where it is one of Slack's."""

    def __init__(self, url: str) -> None:
        super().__init__("webhook", url, _without_secrets(url))
        self._url = url

    def deliver(self, event: Event) -> dict[str, object]:
        """Post it."""
        body = {"text": _for_slack(event)} if self._url.lower().startswith(_SLACK_HOSTS) else event
        try:
            url, login = _login_apart(self._url)
            headers = {"Content-Type": "application/json", "User-Agent": "ckptguard", **login}
            request = urllib.request.Request(url, data=msgspec.json.encode(body), headers=headers, method="POST")
            with urllib.request.build_opener(_NoRedirects).open(request, timeout=WEBHOOK_SECONDS) as answer:
                return {"status": answer.status}
        except urllib.error.HTTPError as error:
            with error:
                again = error.code >= 500 or error.code in _PASSING
                raise NotDeliveredError(f"the server answered with HTTP status {error.code}", again=again) from error
        except OSError as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise NotDeliveredError(_without_address(str(reason), self._url), again=True) from error
        except Exception as error:  # http.client's own, and what it refuses in a URL
            raise NotDeliveredError(f"{type(error).__name__}: {_without_address(str(error), self._url)}") from error


def _login_apart(url: str) -> tuple[str, dict[str, str]]:
    """A URL without the user and password in it, and the header that says them. ValueError for what is no URL."""
    parts = urlsplit(url)
    login, mark, host = parts.netloc.rpartition("@")
    if not mark:
        return url, {}
    user, _, password = login.partition(":")
    said = base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()
    return urlunsplit(parts._replace(netloc=host)), {"Authorization": f"Basic {said}"}


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A webhook that sends us elsewhere (to file:, or into the private network) is a failure."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


class AppriseChannel(Channel):
    """An address of apprise's: Slack, Discord, e-mail, Teams and many more."""

    def __init__(self, address: str, which: str) -> None:
        super().__init__("notify", address, _without_secrets(address) + which)
        self._address = address

    def deliver(self, event: Event) -> dict[str, object]:
        """Send it as a message."""
        try:
            import apprise  # takes half a second and 40 MiB: only when there is something to tell
        except Exception as error:
            raise NotDeliveredError(f"apprise cannot be imported: {type(error).__name__}: {error}") from error
        log = logging.getLogger("apprise")
        log.propagate = False  # it quotes addresses
        log.addHandler(logging.NullHandler())
        try:
            service = apprise.Apprise()
            if not service.add(self._address):
                raise NotDeliveredError("apprise does not know this kind of address, or a part of it is missing")
            kind = apprise.NotifyType.INFO if event.get("event") == "test" else apprise.NotifyType.WARNING
            text, title = event["text"], event["title"]
            done = service.notify(text, title=title, notify_type=kind, body_format=apprise.NotifyFormat.TEXT)
            if not done:
                reason = _without_address("; ".join(entry.message for entry in done.logs()), self._address)
                raise NotDeliveredError(reason or "the service did not take it", again=True)
        except NotDeliveredError:
            raise
        except Exception as error:  # of any of its hundred services
            reason = _without_address(f"{type(error).__name__}: {error}", self._address)
            raise NotDeliveredError(reason, again=True) from error
        return {}


class PluginChannel(Channel):
    """An address ``plugin+NAME://...``, to which the installed plugin of this name delivers."""

    def __init__(self, address: str, which: str, settings: Settings) -> None:
        super().__init__("notify", address, _without_secrets(address) + which)
        self._address, self._settings = address, settings

    def deliver(self, event: Event) -> dict[str, object]:
        """Have the plugin send it, in a process of its own."""
        from ckptguard.plugins.call import PluginError, call_plugin
        from ckptguard.plugins.installed import find_plugin

        name = self._address.partition("://")[0].removeprefix(_BY_PLUGIN)
        plugin = None if self._settings.no_plugins else find_plugin("channels", name)
        if plugin is None or plugin.refused:
            why = "plugins are turned off" if self._settings.no_plugins else f"no package has a channel {name}"
            raise NotDeliveredError(plugin.refused if plugin is not None else why)
        try:
            memory, address = self._settings.worker_memory, self._address
            call_plugin(
                plugin,
                (address, event),
                type(None),
                memory=memory,
                seconds=COMMAND_SECONDS,
                hide=lambda said: _without_address(said, address),  # before it is shortened: not half of a secret
            )
        except PluginError as error:
            raise NotDeliveredError(_without_address(error.message, self._address), again=True) from error
        return {}


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a message arrived at a channel; None: none was sent. `reason`: why it did not."""

    setting: str
    to: str
    delivered: bool | None
    reason: str = ""


def try_out(channel: Channel, event: Event | None) -> Tried:
    """Send an event once, and return the result."""
    delivered, reason = None, ""
    if event is not None:
        try:
            code = channel.deliver(event).get("exit_code", 0)
            delivered, reason = not code, f"it ended with exit code {code}" if code else ""
        except NotDeliveredError as error:
            delivered, reason = False, str(error)
    return Tried(setting=channel.setting, to=channel.shown, delivered=delivered, reason=reason)


def channels_of(settings: Settings, around_start: Context = contextlib.nullcontext) -> list[Channel]:
    """Every channel that the settings name."""
    found: list[Channel] = [CommandChannel(settings.on_incident, around_start)] if settings.on_incident else []
    if settings.webhook is not None:
        found.append(WebhookChannel(settings.webhook))
    addresses = list(dict.fromkeys(settings.notify))
    several = len(addresses) > 1
    for number, address in enumerate(addresses, 1):
        which = f" ({number} of {len(addresses)})" if several else ""
        by_plugin = address.startswith(_BY_PLUGIN)
        found.append(PluginChannel(address, which, settings) if by_plugin else AppriseChannel(address, which))
    return found


def require_apprise(settings: Settings) -> None:
    """SettingsError where `notify` is set and the package that it needs is not installed."""
    if (
        not all(address.startswith(_BY_PLUGIN) for address in settings.notify)
        and importlib.util.find_spec("apprise") is None
    ):
        raise SettingsError("the setting `notify` needs apprise", hint='pip install "ckptguard[notify]"')


def _for_slack(event: Event) -> str:
    """Slack's own marks are `&`, `<` and `>`; what is between asterisks is bold."""
    text = f"*{event['title']}*\n{event['text']}"
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _without_secrets(address: str) -> str:
    """What service it is. Anything behind that may be a token, also where a host would stand."""
    return f"{address.partition('://')[0]}://***"


def _without_address(reason: str, address: str) -> str:
    """Another's words without any part of the address, in its length and on one line."""
    rest = address.partition("://")[2]
    texts = (rest, unquote(rest), repr(rest)[1:-1])  # the last: as errors quote control characters
    parts = {part for text in texts for part in (text, *re.split(r"[/:@?&=#,]", text))}
    for part in sorted(parts, key=len, reverse=True):
        if len(part) >= _SHORTEST_SECRET:
            reason = reason.replace(part, "***")
    return " ".join(reason.split())[:_LONGEST_REASON]


def kill_commands() -> None:
    """Kill every command that runs, with its children, before this process ends. It waits for nothing."""
    for process in list(_commands):
        _kill_group(process)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the latter for sudo
        os.killpg(process.pid, signal.SIGKILL)
