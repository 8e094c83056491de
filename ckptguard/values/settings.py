"""Settings: frozen values from TOML and environment. An impossible value gets a clear sentence.

Only doors read files and the environment. They pass the text or mapping in.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from ckptguard.errors import SettingsError
from ckptguard.values.patterns import Pattern, Saves
from ckptguard.values.record_formats import RECORDS
from ckptguard.values.retention_policy import Policy, parse_best, parse_span
from ckptguard.values.storage_options import NO_OPTIONS, StorageOptions

_WEEK = 7 * 86400.0
LABELS = ("team", "project", "owner")
_LONGEST_LABEL = 100
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://\S.*", re.DOTALL)
ENVIRONMENT_PREFIX = "CKPTGUARD_"
# Settings that there were once. They say nothing any more, but an older release may read the same file.
_REMOVED = frozenset(("executor", "niceness"))
# Variables with that prefix that are not settings: of the commands, and of ckptguard's own tests.
_NO_SETTINGS = ("DEBUG", "SUPERVISED", "CAMPAIGN", "MUTANTS", "TRAINERS", "TORCH", "TEST_DEVICE", "AZURITE")


# What a settings file may say that another user may have written. It starts nothing, names no place, opens no
# connection, holds no key, removes and repairs nothing, trusts no code, hides no file, and raises no limit that hostile
# files have, and lets no verdict pass. The regular expression of a pattern may never end.
# A new setting counts only in the user's own file until it is put here.
HARMLESS = frozenset(
    (
        "settle",
        "scan_interval",
        "unfinished_limit",
        "keep_good",
        "keep_pending",
        "keep",
        "copy_limit",
        "copy_every",
        "on_full",
        "digest",
        "workers",
        "verify_rate",
        "scrub_every",
        "scrub_rate",
        "replica_rate",
    )
)


class ReplicaPlace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A place for replicas. It holds what its rule keeps of the good checkpoints; without one it holds all.

    `thin`: a checkpoint that was thinned in the run is thinned there, too. None: as `replica_thin` says.
    """

    url: str
    keep_last: int | None = None
    keep_every: int | None = None
    keep_within: float | str | None = None
    keep_best: tuple[str, ...] = ()
    thin: bool | None = None

    def policy(self) -> Policy:
        """Return the rule. Whatever it says, the newest good one stays. Raises SettingsError."""
        return _policy_of(self, keep_good=1)


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every limit has its unit in the comment; seconds unless stated."""

    settle: float = 5.0  # two equal samples this far apart make a save quiet
    scan_interval: float = 30.0  # the daemon's timed rescan
    unfinished_limit: float = 900.0  # a save that is unfinished for this long is INCOMPLETE
    keep_good: int = 2  # newest GOOD checkpoints of a series that keep a protected copy
    keep_pending: int = 2  # finished saves of a series that are protected before their verdict
    keep: str = "auto"  # "auto": a link, a full copy once GOOD; "link": only links; "copy": full at once; "none"
    copy_limit: int = 8 * 1024**3  # bytes; larger ones get a full copy at most every `copy_every`
    copy_every: float = 3600.0  # between saves; if reflinks are free, neither counts
    on_full: str = "error"  # a save or restore without free space: "error", or "wait" for space
    records: str | None = None  # another place for our records than <run>/_ckptguard
    records_format: int = RECORDS.writes  # of the records of new runs, and what `migrate` raises a run to
    allow_nonfinite: tuple[str, ...] = ()  # patterns (fnmatch) of tensors that may hold NaN or Inf
    trust_globals: tuple[str, ...] = ()  # pickle globals accepted in stray files
    patterns: tuple[Pattern, ...] = ()  # the user's own rules for names: what is a checkpoint, and its step
    saves: tuple[Saves, ...] = ()  # which files are saved together, and which never
    pointers: tuple[str, ...] = ()  # patterns (fnmatch) of more files that hold nothing but a checkpoint's name
    team: str | None = None  # labels of the run: on metrics, in messages, and for tokens and tables of a fleet file
    project: str | None = None
    owner: str | None = None
    on_incident: tuple[str, ...] = ()  # command (argv) to run for an incident
    checks: tuple[str, ...] = ()  # names of installed plugins that judge each checkpoint of the run, too
    layouts: tuple[str, ...] = ()  # names of installed plugins that find checkpoints
    no_plugins: bool = False  # use no plugin of any kind
    webhook: str | None = None  # http(s) URL to call for an incident
    notify: tuple[str, ...] = ()  # addresses of Slack, Discord, e-mail and others, as apprise writes them
    # "md5": each pass computes MD5 of whole files, too; "auto": not of a large checkpoint beside training;
    # "blake3": only if none is recorded
    digest: str = "auto"
    workers: int = 0  # threads that scan in parallel; 0: one per processor
    worker_memory: int = 4 * 1024**3  # bytes of address space of a scanning process
    worker_seconds: float = 3600.0  # a scan that takes longer is "could not tell"
    verify_rate: float | None = None  # bytes a second that verifying a run beside training may read
    scrub_every: float | str = "auto"  # how often a daemon reads each checkpoint again: seconds, "7d"; 0: never
    scrub_rate: float | None = 50e6  # bytes a second that this may read from one storage
    repair: bool = False  # a daemon repairs damaged files in place by itself, from a copy that has their bytes
    # Which good checkpoints `prune` and the daemon keep, once any of these is set. The others are removed.
    keep_last: int | None = None  # the newest n of a series
    keep_every: int | None = None  # the first of every n steps
    keep_within: float | str | None = None  # those sealed less than this before the newest: seconds, or "2d"
    keep_best: tuple[str, ...] = ()  # METRIC:min or METRIC:max, and :N for more than one
    # Good ones older than the newest n good ones keep weights, config and metrics; what only a resume needs goes.
    thin_after: int | None = None
    keep_bytes: float | str | None = None  # what the run may occupy: bytes, or "2TB". Then it is thinned and pruned
    prune_failed: bool = False  # also remove bad, incomplete and suspect ones, once `keep_good` newer ones are good
    trash_grace: float | str = 86400.0  # how long pruned checkpoints can be restored: seconds, or "1d"
    # Where to keep copies of good checkpoints; {run} is the run's own name. A table gives a place its own rule.
    replicas: tuple[str | ReplicaPlace, ...] = ()
    replica_thin: bool = False  # thin in replicas what was thinned in the run
    replica_rate: float | None = None  # bytes a second that replicating to one storage may read and send
    hints: str | None = None  # URL of an SQS queue with an object store's notifications, which a daemon reads
    # Options for fsspec's file systems, by protocol or by the beginning of a URL; never shows secrets.
    storage: StorageOptions = NO_OPTIONS

    def __post_init__(self) -> None:
        if not isinstance(self.storage, StorageOptions):  # a plain table is accepted
            msgspec.structs.force_setattr(self, "storage", StorageOptions(self.storage))
        for name in ("settle", "scan_interval", "unfinished_limit", "worker_seconds", "copy_every"):
            value = getattr(self, name)
            if not 0 <= value < 1e9:
                raise SettingsError(f"{name} must be a number of seconds, not {value}")
        if self.scan_interval <= 0 or self.worker_seconds <= 0:
            raise SettingsError("scan_interval and worker_seconds must be more than 0 seconds")
        if not 1 <= self.records_format <= RECORDS.reads:
            raise SettingsError(f"records_format must be between 1 and {RECORDS.reads}, not {self.records_format}")
        if self.keep_good < 1:
            raise SettingsError("keep_good must be at least 1, so that there is always a good checkpoint")
        if self.keep_pending < 1:
            raise SettingsError("keep_pending must be at least 1")
        if self.keep not in ("auto", "link", "copy", "none"):
            raise SettingsError(f'keep must be "auto", "link", "copy" or "none", not "{self.keep}"')
        if self.copy_limit < 0:
            raise SettingsError(f"copy_limit must be a number of bytes, not {self.copy_limit}")
        if self.digest not in ("auto", "md5", "blake3"):
            raise SettingsError(f'digest must be "auto", "md5" or "blake3", not "{self.digest}"')
        if self.on_full not in ("error", "wait"):
            raise SettingsError(f'on_full must be "error" or "wait", not "{self.on_full}"')
        if not 0 <= self.workers <= 256:
            raise SettingsError(f"workers must be between 0 and 256, not {self.workers}")
        for name in ("verify_rate", "scrub_rate", "replica_rate"):
            rate = getattr(self, name)
            if rate is not None and not 2**16 <= rate < 1e15:
                raise SettingsError(f"{name} must be at least 65536 bytes a second; leave it out for no limit")
        self.scrub_seconds(local=True)
        if self.worker_memory < 256 * 1024**2:
            raise SettingsError("worker_memory must be at least 268435456 bytes (256 MiB)")
        for name, value in self.labels:
            if not value.strip() or len(value) > _LONGEST_LABEL or not value.isprintable():
                raise SettingsError(f"{name} must be a text of 1 to {_LONGEST_LABEL} characters in one line")
        if self.hints is not None and not self.hints.startswith(("http://", "https://")):
            raise SettingsError("hints must be the http or https URL of an SQS queue")
        if self.webhook is not None and not self.webhook.startswith(("http://", "https://")):
            raise SettingsError("webhook must be an http or https URL")
        for number, address in enumerate(self.notify, 1):
            if not _ADDRESS.fullmatch(address):
                raise SettingsError(  # which is not quoted: it may be a secret
                    f'address {number} of notify does not begin as "slack://" or "mailto://" does',
                    hint="in the environment, write a JSON list if an address has a comma",
                )
        self.retention()
        self._span("trash_grace")
        urls = [place.url for place in self.places]
        for place in (*urls, self.records or ""):
            if place.startswith("["):
                raise SettingsError(
                    f"{place!r} is not a path or URL", hint="write ./[... for a folder with such a name"
                )
        for place in urls:
            if not place.strip() or set("{}") & set(place.replace("{run}", "")):
                raise SettingsError(
                    f'replicas: "{place}" is not a path or URL',
                    hint="only {run} may be in braces; it is replaced by the run's own name",
                )
        for one in self.places:
            try:
                one.policy()
            except SettingsError as error:
                raise SettingsError(f'replicas: "{one.url}": {error.message}', hint=error.hint) from error

    def __repr__(self) -> str:
        """As of any value, without the addresses of people: a token stands in them."""
        text = super().__repr__()
        in_command = (argument for argument in self.on_incident if "://" in argument)
        for address in (*self.notify, self.webhook or "", *in_command):
            text = text.replace(repr(address), "'***'") if address else text
        return text

    @property
    def labels(self) -> tuple[tuple[str, str], ...]:
        """The labels of the run that are set: their names and values."""
        found = ((name, getattr(self, name)) for name in LABELS)
        return tuple((name, value) for name, value in found if value is not None)

    def scrub_seconds(self, *, local: bool) -> float | None:
        """Return the seconds after which a daemon reads a checkpoint again, or None for never. Raises SettingsError.

        "auto" is weekly on a local disk. Elsewhere it is never, because reading may cost money and stores check their
        bytes.
        """
        if self.scrub_every == "auto":
            return _WEEK if local else None
        return self._span("scrub_every") or None

    def _span(self, name: str) -> float | None:
        return _span_of(self, name)

    @property
    def places(self) -> tuple[ReplicaPlace, ...]:
        """The places of `replicas`, each with its rule."""
        return tuple(ReplicaPlace(url=place) if isinstance(place, str) else place for place in self.replicas)

    def retention(self) -> Policy:
        """Return the rules for checkpoints that stay in the run. Raises SettingsError."""
        try:
            own = _policy_of(self, keep_good=self.keep_good)
            size = None if self.keep_bytes is None else _bytes_of(self.keep_bytes)
            more = {"thin_after": self.thin_after, "keep_bytes": size, "drop_failed": self.prune_failed}
            return msgspec.structs.replace(own, **more)
        except SettingsError as error:
            raise SettingsError(f"retention: {error.message}", hint=error.hint) from error

    def of_replica(self) -> Settings:
        """Return the settings for a replica: its records are always inside it."""
        return msgspec.structs.replace(self, records=None)

    def changed(self, **overrides: Any) -> Settings:
        """Return the settings with some replaced. A value of None changes nothing."""
        return msgspec.structs.replace(self, **{k: v for k, v in overrides.items() if v is not None})


def _span_of(rule: Settings | ReplicaPlace, name: str) -> float | None:
    value = getattr(rule, name)
    try:
        return None if value is None else parse_span(value)
    except SettingsError as error:
        raise SettingsError(f"{name}: {error.message}", hint=error.hint) from error


def _policy_of(rule: Settings | ReplicaPlace, *, keep_good: int) -> Policy:
    """Return what the settings of a run or of a place say about what stays. Raises SettingsError."""
    return Policy(
        keep_last=rule.keep_last,
        keep_every=rule.keep_every,
        keep_within=_span_of(rule, "keep_within"),
        keep_best=tuple(parse_best(text) for text in rule.keep_best),
        keep_good=keep_good,
    )


def fits_run(pattern: str, names: Iterable[str], labels: Iterable[tuple[str, str]]) -> bool:
    """True if a shell pattern fits a name of a run. One such as ``team=vision*`` is for the label, and for no name:
    other users may create a folder of that name."""
    label, equals, value = pattern.partition("=")
    if equals and label in LABELS:
        return any(name == label and fnmatchcase(own, value) for name, own in labels)
    return any(fnmatchcase(name, pattern) for name in names)


def parse_settings(text: str, source: str) -> Settings:
    """Parse settings from TOML. SettingsError names `source` and what is wrong."""
    return with_table(Settings(), parse_table(text, source), source)


def parse_table(text: str, source: str) -> dict[str, Any]:
    """Parse TOML whose names are those of settings. SettingsError names `source` and what is wrong."""
    import tomllib  # most commands find no settings file

    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # Python refuses a number of thousands of digits
        place = re.search(r"\(at (line \d+, column \d+)\)$", str(error))
        raise SettingsError(f"{source} is not valid TOML{f': see {place[1]}' if place else ''}") from error
    _refuse_unknown_names(table, source)
    return {name: value for name, value in table.items() if name not in _REMOVED}


def _refuse_unknown_names(table: Mapping[str, Any], source: str) -> None:
    unknown = [name for name in table if name not in _FIELDS and name not in _REMOVED]
    if unknown:
        hint = _did_you_mean(str(unknown[0]), _FIELDS)
        raise SettingsError(f"{source}: there is no setting {unknown[0]!r}", hint=hint)


def with_table(settings: Settings, table: Mapping[str, Any], source: str) -> Settings:
    """Return settings with some replaced by name. SettingsError names `source` and the problem."""
    _refuse_unknown_names(table, source)
    try:
        given = {name: _converted(name, value, name) for name, value in table.items() if name not in _REMOVED}
        return msgspec.structs.replace(settings, **given)
    except SettingsError as error:
        raise SettingsError(f"{source}: {error.message}", hint=error.hint) from None  # it says all that this one says


def with_environment(settings: Settings, environ: Mapping[str, str]) -> Settings:
    """Return settings overridden by ``CKPTGUARD_<NAME>``.

    Lists are JSON or separated by commas, ``CKPTGUARD_STORAGE`` is JSON. Empty variables and unknown ones (see
    `refuse_unknown`) are ignored.
    """
    overrides = {}
    for name in _FIELDS:
        variable = ENVIRONMENT_PREFIX + name.upper()
        text = environ.get(variable)
        if text and name == "storage":
            overrides[name] = _converted(name, _json(variable, text, "object of objects"), variable)
        elif text:
            is_list = isinstance(_FIELDS[name].default, tuple)
            overrides[name] = _converted(name, _listed(variable, text) if is_list else text, variable)
    return settings.changed(**overrides)


def refuse_unknown(environ: Mapping[str, str]) -> None:
    """Raise SettingsError for an unknown variable with our prefix: a mistyped one would have no effect."""
    known = {ENVIRONMENT_PREFIX + name.upper() for name in (*_FIELDS, *_REMOVED)}
    for variable in sorted(environ):
        name = variable.removeprefix(ENVIRONMENT_PREFIX)
        if name != variable and name not in _NO_SETTINGS and variable not in known and environ[variable]:
            raise SettingsError(
                f"the environment has {variable}, but there is no such setting",
                hint=_did_you_mean(variable, known) or "unset it",
            )


def environment_of(settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment that gives another process these settings, without anything that it would refuse."""
    found = {name: text for name, text in environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}
    found |= {
        variable: environ[variable] for name in _NO_SETTINGS if (variable := ENVIRONMENT_PREFIX + name) in environ
    }
    for name, field in _FIELDS.items():
        value = getattr(settings, name)
        if value != field.default and value is not None:
            table = value.revealed() if isinstance(value, StorageOptions) else value
            text = table if isinstance(table, str) else msgspec.json.encode(table).decode()
            found[ENVIRONMENT_PREFIX + name.upper()] = text
    return found


_FIELDS = {field.name: field for field in msgspec.structs.fields(Settings)}
_WORDS = {
    bool: "true or false",
    int: "a whole number",
    int | None: "a whole number",
    float: "a number",
    float | None: "a number",
    float | str: 'a number, or a text such as "2d"',
    float | str | None: 'a number, or a text such as "2d"',
    str: "a text",
    str | None: "a text",
    tuple[str, ...]: "a list of texts",
    tuple[str | ReplicaPlace, ...]: "a list of texts, or of tables with a url and a rule (keep_last, thin and others)",
    tuple[Saves, ...]: "a list of tables with together or apart (lists of texts)",
    tuple[Pattern, ...]: "a list of tables with a path, and optionally a step (a text) and ignore (true or false)",
}


def _converted(name: str, value: Any, called: str) -> Any:
    """Convert the value of one setting. SettingsError says what it must be, and never quotes a table or list."""
    if name == "storage":
        return StorageOptions(value)
    if isinstance(value, int) and (bits := value.bit_length()) >= 64:
        raise SettingsError(f"{called} must be {_WORDS[_FIELDS[name].type]}, not a number of {bits} bits")
    if name == "notify" and isinstance(value, str):
        value = [value]
    try:
        return msgspec.convert(value, type=_FIELDS[name].type, strict=False)
    except msgspec.ValidationError as error:
        found = f", not {str(value)[:80]!r}" if isinstance(value, str | int | float) else ""
        raise SettingsError(f"{called} must be {_WORDS[_FIELDS[name].type]}{found}") from error


def _listed(variable: str, text: str) -> Any:
    return _json(variable, text, "list") if text.lstrip().startswith("[") else [p for p in text.split(",") if p]


def _json(variable: str, text: str, what: str) -> Any:
    kind = {"list": list[Any], "object of objects": dict[str, dict[str, Any]]}[what]
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        # Do not say what was wrong: that could quote a secret.
        example = '\'["a", "b"]\', or a,b' if what == "list" else '\'{"s3": {"profile": "training"}}\''
        raise SettingsError(f"{variable} is not a JSON {what}", hint=f"write {variable}={example}") from None


def _did_you_mean(name: str, known: Iterable[str]) -> str | None:
    import difflib  # only after a mistyped name

    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else None


def _bytes_of(stated: float | str) -> int:
    from ckptguard.values.byte_sizes import parse_size  # few runs have a budget

    return parse_size(stated)
