"""Mistakes with the TLS of a Dask cluster: the error names the file, or the side that refuses the other."""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from servers.processes import free_port
from support.certificates import make_certificate

from ckptguard.bulk.dask_tls import context_of, why_not
from ckptguard.errors import SettingsError


@pytest.fixture
def tls(tmp_path):
    """Settings for TLS, each certificate being its own CA: those of the client and of the server, who trust each
    other."""
    client, key = make_certificate(tmp_path, "client")
    server, server_key = make_certificate(tmp_path, "server")
    return SimpleNamespace(
        ours={"ca-file": server, "client": {"cert": client, "key": key}},
        theirs={"ca-file": client, "client": {"cert": server, "key": server_key}},
    )


@contextlib.contextmanager
def serving(context):
    """A server that asks each client for a certificate, or that speaks no TLS: yields its port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    made, _ = listening.accept()
                    with contextlib.suppress(OSError), made:
                        if context is None:
                            made.sendall(b"hello, this is no TLS")
                            made.recv(100)
                        else:
                            with context.wrap_socket(made, server_side=True) as secure:
                                secure.recv(1)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


def server_of(settings):
    """The server's side of these settings."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(settings["ca-file"])
    context.load_cert_chain(*settings["client"].values())
    return context


def test_without_a_certificate_there_is_no_tls():
    """Nothing is wrong with that here."""
    assert context_of({}) is None
    assert context_of({"ca-file": "x", "client": {"cert": None}}) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tls, path: tls.update({"ca-file": None}), "a certificate for TLS and no ca-file"),
        (lambda tls, path: tls.update({"ca-file": path}), "the CA file PATH cannot be read: No such file"),
        (lambda tls, path: tls["client"].update(cert=path), "the certificate PATH cannot be read: No such file"),
        (lambda tls, path: tls["client"].update(key=path), "the key PATH cannot be read: No such file"),
        (lambda tls, path: tls.update({"ca-file": tls["client"]["key"]}), "the CA file .*client.key holds no certif"),
        (lambda tls, path: tls["client"].update(cert=__file__), "the certificate .*test_dask_tls.py holds no certif"),
        (lambda tls, path: tls["client"].update(key=None), "the key .*client.pem cannot be used"),
        (lambda tls, path: tls["client"].update(cert=tls["ca-file"]), "the key .*client.key is not that of .*server.p"),
        (lambda tls, path: lock(tls["client"], path), "the key PATH cannot be used, or has a password"),
    ],
)
def test_each_file_that_is_of_no_use_is_named(tls, tmp_path, change, words):
    """Before anything is connected."""
    context_of(tls.ours)
    path = str(tmp_path / "other")
    change(tls.ours, path)
    with pytest.raises(SettingsError, match=words.replace("PATH", path)) as raised:
        context_of(tls.ours)
    assert "distributed.comm.tls" in raised.value.hint


def lock(client, path):
    """Give the client a key with a password."""
    subprocess.run(["openssl", "ec", "-aes256", "-passout", "pass:x", "-in", client["key"], "-out", path], check=True)
    client["key"] = path


def test_both_sides_trust_each_other(tls):
    """Then it is something else that is wrong."""
    with serving(server_of(tls.theirs)) as port:
        assert why_not("127.0.0.1", port, context_of(tls.ours)) == "cannot be reached"


def test_each_side_that_refuses_the_other_is_named(tls, tmp_path):
    """Our CA does not fit, our certificate does not, one side has no TLS, or nobody is there."""
    stranger, key = make_certificate(tmp_path, "stranger")
    with serving(server_of(tls.theirs)) as port:
        wrong_ca = context_of({**tls.ours, "ca-file": stranger})
        assert "certificate that our CA file does not accept: " in why_not("127.0.0.1", port, wrong_ca)
        wrong = context_of({**tls.ours, "client": {"cert": stranger, "key": key}})
        assert "refuses our certificate: unknown ca" in why_not("127.0.0.1", port, wrong)
        assert why_not("127.0.0.1", port, None) == "speaks TLS, and Dask has no certificate here"
    with serving(None) as port:
        assert why_not("127.0.0.1", port, context_of(tls.ours)) == "does not speak TLS"
        assert why_not("127.0.0.1", port, None) == "cannot be reached"
    assert why_not("127.0.0.1", free_port(), context_of(tls.ours)) == "cannot be reached: Connection refused"


@pytest.mark.parametrize("mistake", ["none", "CA", "certificate", "no TLS"])
def test_a_real_scheduler_with_tls(tls, tmp_path, mistake):
    """The command says what is wrong, and with the right files it connects."""
    dask = pytest.importorskip("dask")
    distributed = pytest.importorskip("distributed")
    from ckptguard.bulk.dask_cluster import connect
    from ckptguard.errors import WorkerError

    server, key = tls.theirs["client"].values()
    security = distributed.Security(
        require_encryption=True,
        tls_ca_file=both(tmp_path, tls),
        **{
            f"tls_{role}_{kind}": file
            for role in ("scheduler", "worker", "client")
            for kind, file in (("cert", server), ("key", key))
        },
    )
    stranger, stranger_key = make_certificate(tmp_path, "stranger")
    ours = {
        "none": {**tls.ours, "ca-file": both(tmp_path, tls)},
        "CA": {**tls.ours, "ca-file": stranger},
        "certificate": {**tls.ours, "client": {"cert": stranger, "key": stranger_key}},
        "no TLS": {"ca-file": None, "client": {"cert": None, "key": None}},
    }[mistake]
    words = {"CA": "our CA file does not accept", "certificate": "refuses our certificate", "no TLS": "speaks TLS"}
    options = {"n_workers": 1, "threads_per_worker": 1, "processes": False, "dashboard_address": None}
    with distributed.LocalCluster(security=security, protocol="tls", **options) as cluster:
        place = cluster.scheduler_address.removeprefix("tls://")
        own = {f"client.{kind}": file for kind, file in ours["client"].items()}
        flat = {f"distributed.comm.tls.{name}": file for name, file in ({**ours, **own}).items() if name != "client"}
        with dask.config.set(flat), contextlib.ExitStack() as stack:
            if mistake == "none":
                assert sum(connect(place, stack).threads().values()) == 1
                return
            with pytest.raises(WorkerError, match=words[mistake]):
                connect(place, stack)


def both(tmp_path, tls):
    """A file with the certificates of both sides."""
    place = tmp_path / "both.pem"
    place.write_bytes(b"".join(Path(one["ca-file"]).read_bytes() for one in (tls.ours, tls.theirs)))
    return str(place)
