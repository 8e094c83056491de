"""Foreign exceptions become ours: the right kind, with a reason, and without a secret. URLs may hold none."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from ckptguard import errors
from ckptguard.errors import SettingsError
from ckptguard.runs.settings_file import load_settings
from ckptguard.storage import normalise_url, opening, redaction
from ckptguard.storage.failures import storage_error
from ckptguard.storage.redaction import redacted, secrets_in
from ckptguard.values.settings import Settings, parse_settings, with_environment
from ckptguard.values.storage_options import StorageOptions


@pytest.fixture(autouse=True)
def _own_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """What these tests keep out of messages is forgotten afterwards."""
    monkeypatch.setattr(redaction, "_known", set())


class Answered(Exception):
    """A library's error with an HTTP status."""

    def __init__(self, status: int, how: str = "status") -> None:
        super().__init__(f"the store said {status}")
        if how == "response":
            self.response = {"ResponseMetadata": {"HTTPStatusCode": status}}
        else:
            setattr(self, how, str(status) if how == "code" else status)


def caused(error: Exception, by: Exception) -> Exception:
    """The first as raised from the second."""
    error.__cause__ = by
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FileNotFoundError("k"), errors.ObjectMissingError),
        (NotADirectoryError("k"), errors.ObjectMissingError),
        (OSError(errno.ENOENT, "x"), errors.ObjectMissingError),
        (Answered(404), errors.ObjectMissingError),
        (FileExistsError("k"), errors.ObjectExistsError),
        (PermissionError("k"), errors.DeniedError),
        (OSError(errno.EROFS, "x"), errors.DeniedError),
        (Answered(403, "response"), errors.DeniedError),
        (Answered(401, "status_code"), errors.DeniedError),
        (type("NoCredentialsError", (Exception,), {})("none"), errors.DeniedError),
        (OSError(errno.ENOSPC, "x"), errors.StorageFullError),
        (OSError(errno.EDQUOT, "x"), errors.StorageFullError),
        (Answered(507), errors.StorageFullError),
        (TimeoutError(), errors.TransientError),
        (ConnectionResetError(errno.ECONNRESET, "x"), errors.TransientError),
        (BrokenPipeError(), errors.TransientError),
        (socket.gaierror(-3, "try again"), errors.TransientError),
        (OSError(errno.ESTALE, "x"), errors.TransientError),
        (Answered(503, "response"), errors.TransientError),
        (Answered(429, "code"), errors.TransientError),
        (caused(OSError(errno.EIO, "SlowDown"), Answered(503, "response")), errors.TransientError),
        (type("ClientPayloadError", (Exception,), {})("cut"), errors.TransientError),
        (OSError(errno.EIO, "x"), errors.StorageError),
        (Answered(400), errors.StorageError),
        (caused(OSError(errno.EBUSY, "x"), Answered(400, "response")), errors.StorageError),
        (RuntimeError("odd"), errors.StorageError),
    ],
    ids=lambda value: None if isinstance(value, type) else f"{type(value).__name__}-{value}",
)
def test_kinds(error: Exception, kind: type[errors.StorageError]) -> None:
    """Exactly this kind, and the message names the place."""
    found = storage_error(error, "a/k", "s3://bucket")
    assert type(found) is kind
    assert (found.key, "s3://bucket/a/k" in found.message) == ("a/k", True)


@pytest.mark.parametrize(
    "text",
    [
        "cannot reach sftp://user:S3CRET@host/path",
        "https://x.blob.core.windows.net/c/b?sv=2022&sig=S3CRET&se=1",
        "https://b.s3.amazonaws.com/k?X-Amz-Signature=S3CRET&X-Amz-Date=1",
        "X-Amz-Security-Token: S3CRET",
        "Authorization: Bearer S3CRET",
        "{'secret': 'S3CRET', 'endpoint_url': 'x'}",
        "aws_secret_access_key=S3CRET",
        "AccountName=a;AccountKey=S3CRET;EndpointSuffix=x",
        'password="S3CRET"',
        "<AWSAccessKeyId>S3CRET</AWSAccessKeyId>",
    ],
)
def test_secrets_are_blotted_out(text: str) -> None:
    """Whatever a library writes into its message."""
    assert "S3CRET" not in redacted(text)
    assert "S3CRET" not in storage_error(RuntimeError(text), "k", "s3://bucket").message


def test_known_secrets_are_blotted_out() -> None:
    """An option's secret is found wherever it stands; other options are no secrets."""
    pytest.importorskip("s3fs")
    options = {"s3": {"key": "AKIAPLAIN", "secret": "wholly-unmarked", "endpoint_url": "http://endpoint"}}
    opening.open_remote("s3://bucket/run", options=StorageOptions(options))
    found = storage_error(RuntimeError("odd text wholly-unmarked at http://endpoint"), "k", "s3://bucket")
    assert "wholly-unmarked" not in found.message
    assert "http://endpoint" in found.message
    assert secrets_in({"a": [{"password": "12345"}, {"user": "joe"}], "client_keys": ["/home/x/key"]}) == {"12345"}


def test_harmless_text_stays() -> None:
    """Blotting out is no excuse for an unreadable message."""
    text = "NoSuchKey: the key does not exist: s3://bucket/step-5/model.safetensors (tokens: 12)"
    assert redacted("the key does not exist: s3://bucket/step-5") == "the key does not exist: s3://bucket/step-5"
    assert "s3://bucket/step-5/model.safetensors" in redacted(text)


@pytest.mark.parametrize(
    "url",
    ["sftp://me:S3CRET@host/run", "https://host/run?sig=S3CRET", "s3://bucket/run?X-Amz-Signature=S3CRET",
     "s3://AKIA:ab/S3CRET+c@bucket/run", "sftp://me:S3?CRET#S3CRET@host/run"],
)  # fmt: skip
def test_a_url_with_a_secret_is_refused(url: str) -> None:
    """It would end up in records; the refusal does not repeat it."""
    with pytest.raises(SettingsError) as caught:
        normalise_url(url)
    assert "S3CRET" not in str(caught.value)


def test_urls_without_secrets_pass() -> None:
    """Users, ports and containers are none."""
    arn = "s3://arn:aws:s3:eu-west-1:123456789012:accesspoint/models/run@2"
    for url in (
        *("sftp://me@host:2222/run", "sftp://host:2222/run@2", "sftp://[::1]:22/run@2", "s3://bucket/a:b@c/run", arn),
        *("abfs://c@account.dfs.core.windows.net/run", "simplecache::s3://bucket/run@2"),
    ):
        assert normalise_url(url) == url


def test_options_by_protocol_and_by_url() -> None:
    """The longest beginning that fits wins, whole names only."""
    by_name = {"s3": {"a": 1, "b": 1}, "s3://bucket": {"b": 2}, "s3://bucket/deep/": {"c": 3}, "gs": {"d": 4}}
    options = StorageOptions(by_name)
    assert options.for_url("s3://other/x") == options.for_url("s3://bucketful/x") == {"a": 1, "b": 1}
    assert options.for_url("s3://bucket") == options.for_url("s3://bucket/x") == {"a": 1, "b": 2}
    assert options.for_url("s3://bucket/deep/run") == {"a": 1, "b": 2, "c": 3}
    assert options.for_url("memory://x") == {}


def test_a_host_that_says_nothing_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over SFTP, where the library's own limit is two minutes; the user's counts more."""
    sshfs = pytest.importorskip("sshfs")
    asked = []

    class Recorded(sshfs.SSHFileSystem):  # type: ignore[misc]
        def __init__(self, **options: object) -> None:
            asked.append(options)

    monkeypatch.setattr(sshfs, "SSHFileSystem", Recorded)
    for options in ({}, {"sftp": {"login_timeout": 90}}):
        opening._connect_sftp("sftp://quiet.example/run", StorageOptions(options))
    assert [options["login_timeout"] for options in asked] == [20, 90]


def test_options_from_the_settings(tmp_path: Path) -> None:
    """A table of the file, or JSON in the environment; no representation shows them."""
    file = tmp_path / "ckptguard.toml"
    file.write_text('[storage.s3]\nsecret = "S3CRET"\n[storage."s3://bucket"]\nkey = "k"\nclient_kwargs = {x = 1}\n')
    settings = load_settings(str(file), {}, [])
    assert settings.storage.for_url("s3://bucket/run") == {"secret": "S3CRET", "key": "k", "client_kwargs": {"x": 1}}
    assert "S3CRET" not in repr(settings)
    assert repr(Settings()).startswith("Settings(settle=5.0")
    changed = with_environment(Settings(), {"CKPTGUARD_STORAGE": '{"s3": {"secret": "OTHER"}}'})
    assert changed.storage == StorageOptions({"s3": {"secret": "OTHER"}})
    for text in ('{"s3": "S3CRET"}', '{"secret": "S3CRET"'):
        with pytest.raises(SettingsError) as caught:
            with_environment(Settings(), {"CKPTGUARD_STORAGE": text})
        assert "S3CRET" not in str(caught.value)
    with pytest.raises(SettingsError):
        parse_settings("storage = 5", "x")


def test_fsspecs_own_configuration_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user told fsspec is not taken away."""
    import fsspec.config

    from ckptguard.storage.remote.remote_storage import RemoteStorage

    pytest.importorskip("s3fs")
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": "http://127.0.0.1:1", "anon": True})
    options = StorageOptions({"s3": {"anon": False}})
    storage = opening.open_remote(f"s3://bucket-{os.getpid()}/run", options=options)
    assert isinstance(storage, RemoteStorage)
    assert (storage._fs.endpoint_url, storage._fs.anon) == ("http://127.0.0.1:1", False)
