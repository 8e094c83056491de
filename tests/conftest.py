"""For all tests: the signals of a shell's foreground, however pytest itself was started; one thread of torch's in each
process, for the tests share the cores; and quick collections of garbage."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import hypothesis
import pytest

# What the tests themselves are told. No other setting of this machine leaks into them.
_OF_TESTS = frozenset(f"CKPTGUARD_{name}" for name in ("AZURITE", "CAMPAIGN", "MUTANTS", "TEST_DEVICE", "TRAINERS"))
for _name in [name for name in os.environ if name.startswith("CKPTGUARD_") and name not in _OF_TESTS]:
    del os.environ[_name]
os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported, here or in what a test starts
# Read when gcsfs is imported, which many tests do: it would ask Google's storage control for the kind of a bucket, a
# minute long, and the tests have none.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")

pytest.register_assert_rewrite("support")  # what its assertions compare is to be told in full

from servers.fixtures import azure, ceph, gcs, moto, promtool, sftp, slurm  # noqa: E402, F401 - fixtures for all
from support.plugins import plugins  # noqa: E402, F401

from ckptguard.runs.free_space import SHARED, SharedSpace  # noqa: E402

# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile(
    "patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], print_blob=True
)
hypothesis.settings.load_profile("patient")

pytest.register_assert_rewrite("ckptguard.testing")


@pytest.hookimpl(tryfirst=True)
def pytest_configure() -> None:
    """What `nohup` or a shell's `&` had ignored would be ignored by all that the tests start, too."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in ("SIGHUP", "SIGQUIT"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is put into the user's cache, here or in what a test starts, goes with the tests."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _no_other_runs() -> Iterator[None]:
    """The runs and the full disks of one test take no room from the next one."""
    vars(SHARED).update(vars(SharedSpace()))
    yield
    vars(SHARED).update(vars(SharedSpace()))


def pytest_collection_finish() -> None:
    """The modules of torch and its like stay: no collection looks at their million objects again."""
    gc.collect()
    gc.freeze()
