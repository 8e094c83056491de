"""Whatever S3 answers, people get one sentence that names the answer; what may pass is asked again, and nothing else.

The answers come from a server, through s3fs and botocore. What may pass is botocore's own opinion.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from servers.refusing_s3 import RefusingS3
from support.certificates import make_certificate
from support.faulty_storage import FakeClock

from ckptguard.errors import (
    CkptguardError,
    DeniedError,
    ObjectMissingError,
    StorageError,
    StorageFullError,
    TransientError,
)
from ckptguard.runs.target import resolve_target
from ckptguard.storage import open_storage
from ckptguard.storage.service_codes import MEANINGS
from ckptguard.values.settings import Settings
from ckptguard.values.storage_options import StorageOptions

pytest.importorskip("s3fs")

# The status of each answer in S3's documentation, where it is not 400.
STATUS = {
    301: "PermanentRedirect",
    403: "AccessDenied AccountProblem AllAccessDisabled InvalidAccessKeyId InvalidObjectState InvalidPayer"
    " InvalidSecurity NotSignedUp QuotaExceeded RequestTimeTooSkewed SignatureDoesNotMatch",
    404: "NoSuchBucket NoSuchBucketPolicy NoSuchKey NoSuchLifecycleConfiguration NoSuchUpload NoSuchVersion",
    405: "MethodNotAllowed",
    409: "BucketAlreadyExists BucketAlreadyOwnedByYou BucketNotEmpty ConditionalRequestConflict InvalidBucketState"
    " OperationAborted RestoreAlreadyInProgress",
    412: "PreconditionFailed",
    416: "InvalidRange",
    500: "InternalError",
    501: "NotImplemented",
    503: "Busy ServiceUnavailable SlowDown",
    507: "XMinioStorageFull",
}
# What botocore does not ask for again, and passes: a request beside it, and bytes that were damaged on their way.
PASSES_TOO = {
    *("OperationAborted", "ConditionalRequestConflict", "TemporaryRedirect", "RequestTimeout", "Busy"),
    *("BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch"),
}
KINDS = {
    "ExpiredToken": DeniedError,
    "TokenRefreshRequired": DeniedError,
    "InvalidAccessKeyId": DeniedError,
    "SignatureDoesNotMatch": DeniedError,
    "RequestTimeTooSkewed": DeniedError,
    "AccessDenied": DeniedError,
    "InvalidToken": DeniedError,
    "NoSuchBucket": ObjectMissingError,
    "PermanentRedirect": StorageError,
    "AuthorizationHeaderMalformed": StorageError,
    "QuotaExceeded": StorageFullError,
}


def status_of(code: str) -> int:
    """The status that goes with an answer."""
    return next((status for status, codes in STATUS.items() if code in codes.split()), 400)


def answers() -> list[str]:
    """All that s3fs, botocore and we have a word for."""
    from botocore.retries import standard
    from s3fs.errors import ERROR_CODE_TO_EXCEPTION

    throttled = standard.ThrottledRetryableChecker._THROTTLED_ERROR_CODES
    passing = standard.TransientRetryableChecker._TRANSIENT_ERROR_CODES
    ours = [code for code in MEANINGS if not code.endswith("Error") or code in ERROR_CODE_TO_EXCEPTION]
    codes = {*ERROR_CODE_TO_EXCEPTION, *throttled, *passing, *ours, "NobodyHeardOfThis"}
    return sorted(code for code in codes if not code.isdigit() and code != "ProfileNotFound")


def may_pass(code: str) -> bool:
    """Whether botocore asks again."""
    from botocore.retries import standard

    context = SimpleNamespace(
        get_error_code=lambda: code,
        http_response=SimpleNamespace(status_code=status_of(code)),
        caught_exception=None,
    )
    checkers = (standard.TransientRetryableChecker(), standard.ThrottledRetryableChecker())
    return any(checker.is_retryable(context) for checker in checkers)


@pytest.fixture(scope="module")
def refusing() -> Iterator[RefusingS3]:
    """The server."""
    with RefusingS3().running() as server:
        yield server


def options(server: RefusingS3, **more: object) -> StorageOptions:
    """Options of which botocore asks once, so that each further request is ours."""
    config = {"s3": {"addressing_style": "path"}, "retries": {"total_max_attempts": 1}}
    given = {"endpoint_url": server.url, "key": "k", "secret": "S3CRET", "config_kwargs": config, **more}
    return StorageOptions({"s3": given})


def refusal(server: RefusingS3, answer: str, **more: object) -> tuple[StorageError, int]:
    """What listing a run ends with, and how often it was tried."""
    clock = FakeClock()
    storage = open_storage(
        f"s3://bucket/{answer}", must_exist=False, retries=clock.retries(attempts=3), options=options(server, **more)
    )
    with pytest.raises(StorageError) as caught:
        storage.list(recursive=True)
    return caught.value, len(clock.waits) + 1


@pytest.mark.parametrize("code", [code for code in answers() if status_of(code) != 404])
def test_every_answer_is_a_sentence(refusing: RefusingS3, code: str) -> None:
    """It names the place and the answer on one line, and only what may pass is tried again."""
    error, tries = refusal(refusing, f"{status_of(code)}-{code}")
    passes = may_pass(code) or code in PASSES_TOO
    assert (isinstance(error, TransientError), tries) == (passes, 3 if passes else 1)
    assert f"s3://bucket/{status_of(code)}-{code}" in error.message
    if not error.message.endswith("exists already"):  # nobody asks for that in a listing
        assert f"({code})" in error.message
    assert "\n" not in error.message
    assert "Traceback" not in error.message
    assert "S3CRET" not in f"{error.message} {error.hint}"


@pytest.mark.parametrize("code", KINDS)
def test_what_people_can_mend_has_a_hint(refusing: RefusingS3, code: str) -> None:
    """And is of this kind."""
    error, _ = refusal(refusing, f"{status_of(code)}-{code}")
    assert (type(error), bool(error.hint)) == (KINDS[code], True)


@pytest.mark.parametrize("code", KINDS)
def test_the_first_look_at_a_run_says_why(refusing: RefusingS3, code: str) -> None:
    """Although the answer to a HEAD has no body, and so no reason."""
    settings = Settings(storage=options(refusing))
    with pytest.raises(CkptguardError) as caught:
        resolve_target(f"s3://bucket/{status_of(code)}-{code}", settings)
    assert caught.value.hint
    assert code in caught.value.message or code == "NoSuchBucket"
    assert code != "NoSuchBucket" or "there is no bucket s3://bucket" in caught.value.message


@pytest.mark.parametrize("status", [400, 403, 405, 501, 503])
def test_an_answer_without_a_reason(refusing: RefusingS3, status: int) -> None:
    """What a HEAD brings still has a hint."""
    storage = open_storage(
        f"s3://bucket/{status}-Unsaid", must_exist=False, retries=FakeClock().retries(), options=options(refusing)
    )
    with pytest.raises(StorageError, match=str(status)) as caught:
        storage.stat("k")
    assert caught.value.hint


@pytest.mark.parametrize("lacking", ["credentials", "secret", "profile", "trust", "server"])
def test_what_lacks_on_this_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str) -> None:
    """Credentials, a profile, a certificate's authority and a server: each in words with a hint."""
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    tls = None
    if lacking == "trust":
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(*make_certificate(tmp_path, "nobody"))
    server = RefusingS3()
    with server.running(tls):
        more: dict[str, object] = {
            "credentials": {"key": None, "secret": None},
            "secret": {"secret": None},
            "profile": {"profile": "absent"},
        }.get(lacking, {})
        if lacking != "server":
            error, tries = refusal(server, "403-Never", **more)
    if lacking == "server":
        error, tries = refusal(server, "403-Never")
    assert type(error) is {"trust": StorageError, "server": TransientError}.get(lacking, DeniedError), error.message
    assert (tries, bool(error.hint)) == (3 if lacking == "server" else 1, True)
    assert not server.asked
