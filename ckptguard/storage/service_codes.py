"""What S3's error codes, and the exceptions of its libraries, mean for people. Only this table knows their names."""

from __future__ import annotations

import msgspec

from ckptguard.errors import DeniedError, StorageError, StorageFullError, TransientError

UNTRUSTED = "CERTIFICATE_VERIFY_FAILED"  # OpenSSL's name, which the texts of all libraries hold


class Meaning(msgspec.Struct, frozen=True):
    """What a code means, and what to do about it."""

    kind: type[StorageError]
    text: str
    hint: str | None = None


_WHERE = "[storage.s3] in ckptguard.toml"
_RIGHTS = "s3:ListBucket on the bucket, and s3:GetObject, s3:PutObject and s3:DeleteObject on its objects"
_EXPIRED = Meaning(
    DeniedError,
    "the session token has expired",
    "get new credentials; where no person renews them, use a profile or a role that renews itself",
)
_UNKNOWN_KEY = Meaning(
    DeniedError,
    "the store does not know this access key",
    f"check the key, and whether it belongs to this endpoint: {_WHERE}, or AWS_ACCESS_KEY_ID",
)
_REFUSED = Meaning(DeniedError, "these credentials do not allow this", f"allow {_RIGHTS}")
_ACCOUNT = Meaning(DeniedError, "the store refuses this account", "ask those who run the store")
_ELSEWHERE = Meaning(
    StorageError,
    "the bucket is in another region, or at another endpoint",
    f'set client_kwargs = {{region_name = "..."}} or endpoint_url under {_WHERE}',
)
_NOT_OFFERED = Meaning(StorageError, "the store does not offer this", "ckptguard doctor URL says what it offers")
_NO_ROOM = Meaning(StorageFullError, "no space left: a quota is used up", "free some space and try again")
_NO_LOGIN = Meaning(DeniedError, "the login has expired", "log in again: aws sso login")
_BUSY = Meaning(TransientError, "the store is busy", "if it lasts, ask fewer things at once, or ask for a higher limit")
_INTERNAL = Meaning(TransientError, "the store has an internal error")
_TIMEOUT = Meaning(TransientError, "the store waited too long for the request")
_CONFLICT = Meaning(TransientError, "the store is busy with another request for this object")
_CUT = Meaning(TransientError, "the bytes did not arrive as they were sent")

MEANINGS: dict[str, Meaning] = {
    **dict.fromkeys(("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"), _EXPIRED),
    **dict.fromkeys(("InvalidAccessKeyId", "InvalidClientTokenId", "UnrecognizedClientException"), _UNKNOWN_KEY),
    **dict.fromkeys(("AccessDenied", "AccessDeniedException"), _REFUSED),
    **dict.fromkeys(("AccountProblem", "AllAccessDisabled", "NotSignedUp", "InvalidPayer"), _ACCOUNT),
    **dict.fromkeys(("PermanentRedirect", "Redirect", "301", "AuthorizationHeaderMalformed"), _ELSEWHERE),
    **dict.fromkeys(("IllegalLocationConstraintException", "InvalidLocationConstraint"), _ELSEWHERE),
    **dict.fromkeys(("MethodNotAllowed", "NotImplemented", "405", "501"), _NOT_OFFERED),
    **dict.fromkeys(("QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded"), _NO_ROOM),
    **dict.fromkeys(("TokenRetrievalError", "UnauthorizedSSOTokenError", "SSOTokenLoadError"), _NO_LOGIN),
    **dict.fromkeys(("SlowDown", "ServiceUnavailable", "Busy", "503", "429"), _BUSY),
    **dict.fromkeys(("Throttling", "ThrottlingException", "ThrottledException", "EC2ThrottledException"), _BUSY),
    **dict.fromkeys(("RequestThrottled", "RequestThrottledException", "TooManyRequestsException"), _BUSY),
    **dict.fromkeys(("RequestLimitExceeded", "LimitExceededException", "BandwidthLimitExceeded"), _BUSY),
    **dict.fromkeys(("ProvisionedThroughputExceededException", "509"), _BUSY),
    **dict.fromkeys(("InternalError", "500", "502"), _INTERNAL),
    **dict.fromkeys(("RequestTimeout", "RequestTimeoutException", "408", "504"), _TIMEOUT),
    **dict.fromkeys(("OperationAborted", "ConditionalRequestConflict", "PriorRequestNotComplete"), _CONFLICT),
    **dict.fromkeys(("TransactionInProgressException", "TemporaryRedirect", "307"), _CONFLICT),
    **dict.fromkeys(("BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch"), _CUT),
    **dict.fromkeys(
        ("InvalidToken", "InvalidSecurity"),
        Meaning(DeniedError, "the store cannot read these credentials", f"check key, secret and token: {_WHERE}"),
    ),
    "SignatureDoesNotMatch": Meaning(
        DeniedError,
        "the secret key is wrong",
        f"check the secret: {_WHERE}, or AWS_SECRET_ACCESS_KEY. A proxy that changes requests does this too",
    ),
    "RequestTimeTooSkewed": Meaning(
        DeniedError, "the clocks of this machine and of the store differ too much", "set this machine's clock, by NTP"
    ),
    "InvalidObjectState": Meaning(
        DeniedError, "the object is archived, and cannot be read there", "restore it in the store first"
    ),
    # The answer to a HEAD has no body, so the store cannot say why.
    "400": Meaning(
        StorageError, "the store refuses without a reason", "check that the token is not expired, and the region"
    ),
    "403": Meaning(
        DeniedError,
        "the store refuses without a reason",
        f"check the credentials and this machine's clock, and allow {_RIGHTS}",
    ),
    "NoCredentialsError": Meaning(
        DeniedError,
        "there are no credentials",
        f"put key and secret, or a profile, under {_WHERE}. Public buckets need anon = true",
    ),
    "PartialCredentialsError": Meaning(
        DeniedError, "the credentials are incomplete", f"give both key and secret, under {_WHERE}"
    ),
    "CredentialRetrievalError": Meaning(
        TransientError, "the credentials could not be fetched", "check the profile or the role that gives them"
    ),
    "ProfileNotFound": Meaning(
        DeniedError, "there is no such profile", f"check profile under {_WHERE}, AWS_PROFILE and ~/.aws/config"
    ),
    UNTRUSTED: Meaning(
        StorageError,
        "the store's certificate is not trusted",
        f'name your CA, for S3 as client_kwargs = {{verify = "/path/ca.pem"}} under {_WHERE}',
    ),
    "EndpointConnectionError": Meaning(
        TransientError, "the store cannot be reached", f"check the network, and endpoint_url under {_WHERE}"
    ),
}
