"""For all tests: the signals of a shell's foreground, however pytest itself was started."""

from __future__ import annotations

import signal

import pytest
from servers.fixtures import azure, ceph, gcs, moto, sftp  # noqa: F401 - fixtures for all


@pytest.hookimpl(tryfirst=True)
def pytest_configure() -> None:
    """What `nohup` or a shell's `&` had ignored would be ignored by all that the tests start, too."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in ("SIGHUP", "SIGQUIT"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
