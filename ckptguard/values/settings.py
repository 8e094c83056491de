"""Settings: frozen, from TOML and environment, refusing nonsense with a sentence.

Only doors read files and the environment; they pass the text or mapping in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ckptguard.errors import SettingsError
from ckptguard.values.patterns import Pattern
from ckptguard.values.retention_policy import Policy, parse_best, parse_span
from ckptguard.values.storage_options import NO_OPTIONS, StorageOptions

_WEEK = 7 * 86400.0
ENVIRONMENT_PREFIX = "CKPTGUARD_"


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every limit has its unit in the comment; seconds unless said."""

    settle: float = 5.0  # two equal samples this far apart make a save quiet
    scan_interval: float = 30.0  # the timed rescan of the daemon
    unfinished_limit: float = 900.0  # a save that does not finish for so long is INCOMPLETE
    keep_good: int = 2  # newest GOOD checkpoints of a series that keep a protected copy
    keep_pending: int = 2  # finished saves of a series that are protected before their verdict
    keep: str = "auto"  # "auto": a link at once, bytes of its own once GOOD; "link": never; "copy": at once; "none"
    copy_limit: int = 8 * 1024**3  # bytes; larger ones get bytes of their own at most every `copy_every`
    copy_every: float = 3600.0  # of saves; where reflinks cost nothing, neither counts
    on_full: str = "error"  # what a save or restore does where there is no room for it: "error", or "wait" for room
    records: str | None = None  # another place for our records than <run>/_ckptguard
    allow_nonfinite: tuple[str, ...] = ()  # patterns (fnmatch) of tensors that may hold NaN or Inf
    trust_globals: tuple[str, ...] = ()  # pickle globals accepted in stray files
    patterns: tuple[Pattern, ...] = ()  # the user's own words about names: what is a checkpoint, and its step
    on_incident: tuple[str, ...] = ()  # command (argv) told of incidents
    webhook: str | None = None  # http(s) URL told of incidents
    digest: str = "md5"  # "md5": each pass takes whole files' MD5 too; "blake3": not where it is on record already
    executor: str = "threads"  # where the command line scans: "inline", "threads" or "processes"; a daemon: a process
    workers: int = 0  # how many threads or processes scan side by side; 0: as many as there are processors
    worker_memory: int = 4 * 1024**3  # bytes of address space of a scanning process
    worker_seconds: float = 3600.0  # a scan that takes longer is "could not tell"
    niceness: int = 10  # how far what verifies beside training stands back from it; 0: not at all
    verify_rate: float | None = None  # bytes a second that are read at most to verify beside training
    scrub_every: float | str = "auto"  # a daemon reads each checkpoint again so often: seconds, "7d"; 0: never
    scrub_rate: float | None = 50e6  # bytes a second that are read for that at most
    repair: bool = False  # a daemon puts damaged files in place right by itself, from a copy that has their bytes
    # Which good checkpoints `prune` leaves in place, and the daemon, once any of these is set; the others go.
    keep_last: int | None = None  # the newest n of a series
    keep_every: int | None = None  # the first of every n steps
    keep_within: float | str | None = None  # those sealed so long before the newest: seconds, or "2d"
    keep_best: tuple[str, ...] = ()  # METRIC:min or METRIC:max, and :N for more than one
    prune_failed: bool = False  # bad, incomplete and suspect ones go too, once `keep_good` newer ones are good
    trash_grace: float | str = 86400.0  # so long what was pruned can be restored: seconds, or "1d"
    replicas: tuple[str, ...] = ()  # where good checkpoints are to lie too; {run} stands for the run's own name
    replica_rate: float | None = None  # bytes a second that are read and sent at most to replicate
    # What fsspec's file systems are told besides a URL, by protocol or by the beginning of a URL; shows no secrets.
    storage: StorageOptions = NO_OPTIONS

    def __post_init__(self) -> None:
        if not isinstance(self.storage, StorageOptions):  # a plain table will do
            msgspec.structs.force_setattr(self, "storage", StorageOptions(self.storage))
        for name in ("settle", "scan_interval", "unfinished_limit", "worker_seconds", "copy_every"):
            value = getattr(self, name)
            if not 0 <= value < 1e9:
                raise SettingsError(f"{name} must be a number of seconds, not {value}")
        if self.scan_interval <= 0 or self.worker_seconds <= 0:
            raise SettingsError("scan_interval and worker_seconds must be more than 0 seconds")
        if self.keep_good < 1:
            raise SettingsError("keep_good must be at least 1: there is always a good one")
        if self.keep_pending < 1:
            raise SettingsError("keep_pending must be at least 1")
        if self.keep not in ("auto", "link", "copy", "none"):
            raise SettingsError(f'keep must be "auto", "link", "copy" or "none", not "{self.keep}"')
        if self.copy_limit < 0:
            raise SettingsError(f"copy_limit must be a number of bytes, not {self.copy_limit}")
        if self.digest not in ("md5", "blake3"):
            raise SettingsError(f'digest must be "md5" or "blake3", not "{self.digest}"')
        if self.executor not in ("inline", "threads", "processes"):
            raise SettingsError(f'executor must be "inline", "threads" or "processes", not "{self.executor}"')
        if self.on_full not in ("error", "wait"):
            raise SettingsError(f'on_full must be "error" or "wait", not "{self.on_full}"')
        if not 0 <= self.workers <= 256:
            raise SettingsError(f"workers must be between 0 and 256, not {self.workers}")
        if not 0 <= self.niceness <= 19:
            raise SettingsError(f"niceness must be between 0 and 19, not {self.niceness}")
        for name in ("verify_rate", "scrub_rate", "replica_rate"):
            rate = getattr(self, name)
            if rate is not None and not 2**16 <= rate < 1e15:
                raise SettingsError(f"{name} must be at least 65536 bytes a second; leave it out for no limit")
        self.scrub_seconds(local=True)
        if self.worker_memory < 256 * 1024**2:
            raise SettingsError("worker_memory must be at least 268435456 bytes (256 MiB)")
        if self.webhook is not None and not self.webhook.startswith(("http://", "https://")):
            raise SettingsError("webhook must be an http or https URL")
        self.retention()
        try:
            parse_span(self.trash_grace)
        except SettingsError as error:
            raise SettingsError(f"trash_grace: {error.message}", hint=error.hint) from error
        for place in self.replicas:
            if not place.strip() or set("{}") & set(place.replace("{run}", "")):
                raise SettingsError(
                    f'replicas: "{place}" is no path or URL', hint="{run} stands for the run's own name, and no other"
                )

    def scrub_seconds(self, *, local: bool) -> float | None:
        """Seconds after which a daemon reads a checkpoint again; None for never. "auto": weekly on a local disk, never
        elsewhere, where reading may cost money and stores look after their bytes themselves. SettingsError."""
        if self.scrub_every == "auto":
            return _WEEK if local else None
        try:
            return parse_span(self.scrub_every) or None
        except SettingsError as error:
            raise SettingsError(f"scrub_every: {error.message}", hint=error.hint) from error

    def retention(self) -> Policy:
        """The rules by which checkpoints stay in the run. SettingsError."""
        try:
            return Policy(
                keep_last=self.keep_last,
                keep_every=self.keep_every,
                keep_within=None if self.keep_within is None else parse_span(self.keep_within),
                keep_best=tuple(parse_best(text) for text in self.keep_best),
                keep_good=self.keep_good,
                drop_failed=self.prune_failed,
            )
        except SettingsError as error:
            raise SettingsError(f"retention: {error.message}", hint=error.hint) from error

    def of_replica(self) -> Settings:
        """The same settings for a replica: its records always lie in it."""
        return msgspec.structs.replace(self, records=None)

    def changed(self, **overrides: Any) -> Settings:
        """The same settings with some replaced; values of None leave what was."""
        return msgspec.structs.replace(self, **{k: v for k, v in overrides.items() if v is not None})


def parse_settings(text: str, source: str) -> Settings:
    """Settings from TOML; SettingsError names `source` and what is wrong."""
    import tomllib  # most commands find no file of settings

    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{source} is not valid TOML: {error}") from error
    return _converted(table, source)


def with_environment(settings: Settings, environ: Mapping[str, str]) -> Settings:
    """Settings overridden by ``CKPTGUARD_<NAME>``; lists are separated by commas, ``CKPTGUARD_STORAGE`` is JSON. Other
    variables are ignored."""
    overrides: dict[str, Any] = {}
    for field in msgspec.structs.fields(Settings):
        text = environ.get(ENVIRONMENT_PREFIX + field.name.upper())
        if text and field.name == "storage":
            overrides[field.name] = _storage_options(text)
        elif text:
            is_list = isinstance(field.default, tuple)
            overrides[field.name] = [part for part in text.split(",") if part] if is_list else text
    if not overrides:
        return settings
    table = msgspec.to_builtins(settings, enc_hook=lambda options: options.revealed())
    return _converted({**table, **overrides}, "the environment")


def _converted(table: Mapping[str, Any], source: str) -> Settings:
    try:
        return msgspec.convert(dict(table), type=Settings, strict=False, dec_hook=_storage_table)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{source}: {error}") from error


def _storage_table(kind: type, value: Any) -> StorageOptions:
    """Options as TOML or JSON has them; `kind` is always their type, the only one of ours among the settings."""
    del kind
    try:
        return StorageOptions(value)
    except SettingsError as error:
        raise ValueError(error.message) from error


def _storage_options(text: str) -> dict[str, dict[str, Any]]:
    try:
        return msgspec.json.decode(text, type=dict[str, dict[str, Any]])
    except (msgspec.DecodeError, UnicodeError):
        # Not what was wrong with it: that could quote a secret.
        raise SettingsError("CKPTGUARD_STORAGE is no JSON object of objects") from None
