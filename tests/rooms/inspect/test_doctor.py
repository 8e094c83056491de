"""The doctor finds out what a storage does, says what follows, and leaves nothing behind."""

from __future__ import annotations

import errno
import json
import os
import secrets
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from servers.fixtures import S3_BUCKETS, served, serving
from servers.processes import free_port
from servers.s3 import S3Server
from servers.sshd import SftpServer
from support.faulty_storage import FakeClock, Fault, Faults, FaultyStorage, LateListing, wrapped

import ckptguard.inspect.doctor as doctor
from ckptguard.cli.entry import commands
from ckptguard.errors import CouldNotTellError, DeniedError, NotFoundError, ObjectMissingError, StoppedError
from ckptguard.inspect.doctor import diagnose, words
from ckptguard.storage import Capabilities, Storage, open_storage
from ckptguard.storage.local.inotify import Inotify


def place() -> str:
    """A fresh URL."""
    return f"memory://doctor-{secrets.token_hex(8)}"


def answers(url: str, wrap: Any = None) -> tuple[str, dict[str, str]]:
    """The outcome and each probe's answer, through a wrapper of the storage."""
    with wrapped(wrap or (lambda inner: inner)):
        found = diagnose(url, served().storage)
    assert [probe.name for probe in found.probes] == list(doctor._NAMES)
    assert words(found)
    return found.outcome, {probe.name: probe.answer for probe in found.probes}


def left(url: str) -> list[str]:
    """What lies at a URL."""
    try:
        return [
            entry.key for entry in open_storage(url, must_exist=False, options=served().storage).list(recursive=True)
        ]
    except ObjectMissingError:
        return []


def test_a_sound_folder(tmp_path: Path) -> None:
    """A local folder can do all that matters; nothing stays behind."""
    (tmp_path / "file").write_bytes(b"1")
    outcome, found = answers(str(tmp_path))
    assert outcome == "good"
    assert {found[name] for name in ("exclusive create", "links", "inotify", "large objects", "free space")} == {"yes"}
    assert found["requests"] == "no"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_path_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    """A typing error is told, and makes no folder."""
    with pytest.raises(NotFoundError):
        diagnose(str(tmp_path / "absent"))
    assert list(tmp_path.iterdir()) == []


class _Replacing(FaultyStorage):
    """A store that ignores the condition of a create."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner, Faults(Fault.EIO, nth=0))

    def create(self, key: str, data: bytes) -> None:
        with self.inner.upload(key, replace=True) as upload:
            upload.write(data)
            upload.commit()

    def capabilities(self) -> Capabilities:
        return msgspec.structs.replace(self.inner.capabilities(), exclusive_create=False, exclusive_upload=False)


def test_a_store_that_ignores_the_condition() -> None:
    """It is usable by one writer, and the exit code says that there is a restriction."""
    url = place()
    outcome, found = answers(url, _Replacing)
    assert (outcome, found["exclusive create"], found["large objects"]) == ("limited", "no", "no")
    with wrapped(_Replacing):
        result = CliRunner().invoke(commands, ["doctor", url])
    assert result.exit_code == 4
    assert "only one process" in result.output
    assert left(url) == []


def test_a_store_that_lies() -> None:
    """Wrong bytes make it bad, whatever else it can do."""
    url = place()
    wrong = Faults(Fault.WRONG_BYTES, nth=1, forever=True, only=lambda operation, key: operation == "read")
    outcome, found = answers(url, lambda inner: FaultyStorage(inner, wrong))
    assert (outcome, found["read after write"], found["ranged reads"]) == ("bad", "no", "no")
    with wrapped(lambda inner: FaultyStorage(inner, wrong)):
        assert CliRunner().invoke(commands, ["doctor", url]).exit_code == 3
    assert left(url) == []


def test_a_read_only_store() -> None:
    """Where nothing can be written, verifying is what is left."""
    refused = Faults(Fault.EACCES, nth=1, forever=True, only=lambda operation, key: operation == "create")
    outcome, found = answers(place(), lambda inner: FaultyStorage(inner, refused))
    assert (outcome, found["write"], found["delete"]) == ("limited", "no", "unknown")


def test_a_store_that_lets_nobody_in() -> None:
    """Without credentials nothing can be verified either: that is no restriction, and no answer."""
    refused = Faults(Fault.EACCES, nth=1, forever=True)
    with wrapped(lambda inner: FaultyStorage(inner, refused)), pytest.raises(DeniedError):
        diagnose(place())


def test_a_store_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence, and not one for every probe."""
    monkeypatch.setattr(doctor, "LIMIT", 0.2)
    never = threading.Event()

    class Silent(FaultyStorage):
        def create(self, key: str, data: bytes) -> None:
            never.wait(30)
            super().create(key, data)

    with wrapped(lambda inner: Silent(inner, Faults(Fault.EIO, nth=0))):
        with pytest.raises(CouldNotTellError, match="no answer"):
            diagnose(place())
        never.set()


IMPORTED = """
import sys, threading
from ckptguard.errors import CouldNotTellError
from ckptguard.inspect.doctor import diagnose
from ckptguard.values.storage_options import StorageOptions
class Noted:
    def find_spec(self, name, *_):
        if name == sys.argv[1]:
            print(threading.current_thread() is threading.main_thread())
sys.meta_path.insert(0, Noted())
try:
    diagnose(sys.argv[2], StorageOptions({sys.argv[2]: {"host": "127.0.0.1"} if sys.argv[1] == "sshfs" else {}}))
except CouldNotTellError:
    pass
"""


@pytest.mark.parametrize(("library", "url"), [("s3fs", "s3://bucket/run"), ("sshfs", "sftp://127.0.0.1:1/run")])
def test_what_takes_long_to_import_takes_none_of_the_time(library: str, url: str) -> None:
    """The store's time begins when its library is there: a busy machine makes no store silent."""
    environment = {**os.environ, "AWS_ENDPOINT_URL": "http://127.0.0.1:1", "AWS_MAX_ATTEMPTS": "1"}
    command = [sys.executable, "-c", IMPORTED, library, url]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr


def test_a_late_listing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Listings that lag are found out, and are a restriction."""
    monkeypatch.setattr(doctor, "_TIMEOUT", 0.2)
    url, clock = place(), FakeClock()
    outcome, found = answers(url, lambda inner: LateListing(inner, clock, lambda key: 5.0))
    assert (outcome, found["listing after write"], found["read after write"]) == ("limited", "no", "yes")


def test_a_probe_that_fails_is_unknown() -> None:
    """An error in one probe leaves the others."""
    broken = Faults(Fault.EIO, nth=1, only=lambda operation, key: operation == "read")
    outcome, found = answers(place(), lambda inner: FaultyStorage(inner, broken))
    assert (outcome, sorted(found.values()).count("unknown"), found["delete"]) == ("unknown", 2, "yes")


def test_a_store_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """When time is up, what was found out is told."""
    monkeypatch.setattr(doctor, "_GRACE", 0.05)
    hangs, never = threading.Event(), threading.Event()

    class Hanging(FaultyStorage):
        def remove(self, key: str) -> None:
            hangs.set()
            never.wait(60)
            super().remove(key)

    class Probing(threading.Thread):
        def join(self, timeout: float | None = None) -> None:
            if timeout == doctor.LIMIT:  # time is up when it hangs, however long it took to get there
                assert hangs.wait(60)
            else:
                super().join(timeout)

    monkeypatch.setattr(doctor, "threading", SimpleNamespace(Event=threading.Event, Thread=Probing))

    outcome, found = answers(place(), lambda inner: Hanging(inner, Faults(Fault.EIO, nth=0)))
    never.set()
    assert (outcome, found["ranged reads"], found["delete"]) == ("unknown", "yes", "unknown")


def test_a_store_out_of_reach() -> None:
    """One sentence, exit code 1, and no secret in it."""
    secret = "a-very-secret-key"
    options = {"s3": {"endpoint_url": f"http://127.0.0.1:{free_port()}", "key": "k", "secret": secret}}
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("AWS_MAX_ATTEMPTS", "1")
        patched.setenv("CKPTGUARD_STORAGE", json.dumps(options))
        result = CliRunner().invoke(commands, ["doctor", "s3://nowhere/run"])
    assert result.exit_code == 1, result.output
    assert secret not in result.output


@pytest.mark.parametrize("server", ["moto", "ceph"])
def test_an_object_store(server: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 is exclusive, and has neither links nor events."""
    monkeypatch.setattr(doctor, "LIMIT", 60.0)  # a busy machine is not what is tested
    found: S3Server = request.getfixturevalue(server)
    assert found.endpoint
    url = f"s3://{S3_BUCKETS[server == 'ceph']}/doctor-{secrets.token_hex(8)}"
    outcome, probes = answers(url)
    assert (outcome, probes["exclusive create"]) == ("good", "yes")
    assert (probes["links"], probes["inotify"], probes["free space"]) == ("no", "no", "unknown")
    assert probes["requests"] == "yes"
    assert left(url) == []


def test_an_sftp_server(sftp: SftpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real file system behind SSH is exclusive, has links, and tells its free space."""
    monkeypatch.setattr(doctor, "LIMIT", 60.0)
    folder = sftp.folder / f"doctor-{secrets.token_hex(8)}"
    folder.mkdir()
    outcome, probes = answers(sftp.url(folder))
    assert (outcome, probes["exclusive create"], probes["links"], probes["free space"]) == ("good", "yes", "yes", "yes")
    assert list(folder.iterdir()) == []


def test_an_unknown_protocol() -> None:
    """It is a setting that cannot be true."""
    assert CliRunner().invoke(commands, ["doctor", "nosuch://x"]).exit_code == 2


def test_a_bucket_that_is_not_there(moto: S3Server) -> None:
    """It is the bucket that is named, and not an object of the probes."""
    assert moto.endpoint
    url = "s3://ckptguard-no-such-bucket/run"
    serving("s3://ckptguard-no-such-bucket", moto.options)
    with pytest.raises(ObjectMissingError) as raised:
        diagnose(url, served().storage)
    assert raised.value.message == "there is no bucket s3://ckptguard-no-such-bucket"
    assert raised.value.hint


def test_time_that_is_up_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """What had no answer is named once, with how to give it more time."""
    never = threading.Event()

    class Silent(FaultyStorage):
        def remove(self, key: str) -> None:
            never.wait(60)
            super().remove(key)

    monkeypatch.setattr(doctor, "_GRACE", 0.05)
    with wrapped(lambda inner: Silent(inner, Faults(Fault.EIO, nth=0))):
        result = CliRunner().invoke(commands, ["doctor", place(), "--seconds", "1"])
    never.set()
    assert result.exit_code == 1
    late = [line for line in result.stdout.splitlines() if "no answer within 1 s" in line]
    assert len(late) == 1
    assert "delete, large objects, clock" in late[0]
    assert "--seconds" in result.stderr


def test_probes_that_were_called_off_have_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Being called off is no trouble of the storage's."""
    off = Faults(Fault.EIO, nth=0)

    class CalledOff(FaultyStorage):
        def stat(self, key: str) -> Any:
            raise StoppedError(f"{key}: called off", key=key)

    with wrapped(lambda inner: CalledOff(inner, off)):
        found = {probe.name: probe for probe in diagnose(place()).probes}
    assert (found["delete"].answer, found["clock"].answer) == ("unknown", "unknown")
    assert "called off" not in found["delete"].means + found["clock"].means


@pytest.mark.parametrize(("what", "number"), [("__init__", errno.EMFILE), ("add", errno.ENOSPC)])
def test_no_watches_left_is_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, number: int) -> None:
    """A machine may have given out all of its inotify instances or watches; then the daemon looks by its timer."""

    def none_left(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Inotify, what, none_left)
    assert answers(str(tmp_path))[1]["inotify"] == "no"


def test_records_that_lie_elsewhere_are_what_is_probed(tmp_path: Path) -> None:
    """A run may be read-only; what must be written to is the place of its records."""
    run, records = tmp_path / "run", tmp_path / "records"
    run.mkdir()
    records.mkdir()
    result = CliRunner().invoke(commands, ["doctor", str(run), "--records", str(records), "--json"])
    assert (result.exit_code, json.loads(result.stdout)["target"]) == (0, str(records))
    absent = CliRunner().invoke(commands, ["doctor", str(tmp_path / "absent"), "--records", str(records)])
    assert absent.exit_code == 10


def test_a_mistyped_option_of_a_storage_is_named() -> None:
    """It is no mistake of the store's: the settings are to be looked at."""
    options = {"s3": {"endpoint_url": f"http://127.0.0.1:{free_port()}", "kye": "k"}}
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("CKPTGUARD_STORAGE", json.dumps(options))
        result = CliRunner().invoke(commands, ["doctor", "s3://nowhere/run"])
    assert result.exit_code == 1
    assert "an option of this storage is not known" in result.stderr
    assert "'kye'" in result.stderr
    assert "[storage]" in result.stderr
