"""Mistakes with the TLS of a Dask cluster: the error names the file, or the side that refuses the other."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from support.certificates import make_certificate

from ckptguard.bulk.dask_cluster import connect
from ckptguard.errors import SettingsError, WorkerError

dask = pytest.importorskip("dask", reason="Dask is missing: pip install 'ckptguard[dask]'")
distributed = pytest.importorskip("distributed", reason="Dask is missing: pip install 'ckptguard[dask]'")


@pytest.fixture
def tls(tmp_path):
    """Certificates and keys, each certificate being its own CA, and a file with the CAs of both sides."""
    found = SimpleNamespace(**{name: make_certificate(tmp_path, name) for name in ("client", "server", "stranger")})
    found.both = str(tmp_path / "both.pem")
    Path(found.both).write_bytes(b"".join(Path(one[0]).read_bytes() for one in (found.client, found.server)))
    found.locked = str(tmp_path / "locked.key")
    key = load_pem_private_key(Path(found.client[1]).read_bytes(), None)
    form = (Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    Path(found.locked).write_bytes(key.private_bytes(*form))
    return found


@contextlib.contextmanager
def configured(ca, cert, key):
    """As the configuration of Dask has it."""
    names = {"ca-file": ca, "client.cert": cert, "client.key": key}
    with dask.config.set({f"distributed.comm.tls.{name}": value for name, value in names.items()}):
        yield


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ca": None}, "has a certificate for TLS and no ca-file"),
        ({"ca": "nowhere"}, "nowhere cannot be read: No such file"),
        ({"cert": "nowhere"}, "nowhere cannot be read: No such file"),
        ({"key": "nowhere"}, "nowhere cannot be read: No such file"),
        ({"key": "locked"}, "locked.key has a password"),
        ({"ca": "client key"}, "cannot use these files for TLS: .*client.key"),
        ({"cert": __file__}, "cannot use these files for TLS: .*test_dask_tls.py"),
        ({"key": None}, "cannot use these files for TLS: .*client.pem"),
        ({"key": "server key"}, "cannot use these files for TLS: .*client.pem, .*server.key"),
    ],
)
def test_files_that_are_of_no_use_are_named(tls, change, words):
    """Before anything is connected."""
    given = {"ca": tls.both, "cert": tls.client[0], "key": tls.client[1], **change}
    keys = {"client key": tls.client[1], "server key": tls.server[1], "locked": tls.locked}
    with (
        configured(*(keys.get(value, value) for value in given.values())),
        contextlib.ExitStack() as stack,
        pytest.raises(SettingsError, match=words) as raised,
    ):
        connect("192.0.2.7:8786", stack)
    assert "distributed.comm.tls" in raised.value.hint


def test_a_real_scheduler_with_tls(tls):
    """The error says which side refuses the other, and with the right files it connects."""
    roles = {
        f"tls_{role}_{kind}": file
        for role in ("scheduler", "worker", "client")
        for kind, file in zip(("cert", "key"), tls.server, strict=True)
    }
    security = distributed.Security(require_encryption=True, tls_ca_file=tls.both, **roles)
    options = {"n_workers": 1, "threads_per_worker": 1, "processes": False, "dashboard_address": None}
    mistakes = [
        ((tls.stranger[0], *tls.client), "our CA file does not accept"),
        ((tls.both, *tls.stranger), "refuses our certificate|reset"),  # it may be gone before its answer is read
        ((None, None, None), "cannot be reached"),
    ]
    with distributed.LocalCluster(security=security, protocol="tls", **options) as cluster:
        place = cluster.scheduler_address.removeprefix("tls://")
        with configured(tls.both, *tls.client), contextlib.ExitStack() as stack:
            assert sum(connect(place, stack).threads().values()) == 1
        for files, words in mistakes:
            with (
                configured(*files),
                contextlib.ExitStack() as stack,
                pytest.raises(WorkerError, match=words) as raised,
            ):
                connect(place, stack)
            assert "distributed.comm.tls" in raised.value.hint
