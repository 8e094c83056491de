"""Load the settings for every door: flags first, then ``CKPTGUARD_*``, then the file, then defaults."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ckptguard.errors import SettingsError
from ckptguard.storage.redaction import redacted
from ckptguard.values.ids import escape
from ckptguard.values.own_log import log as _log
from ckptguard.values.settings import (
    ENVIRONMENT_PREFIX,
    HARMLESS,
    ReplicaPlace,
    Settings,
    parse_table,
    refuse_unknown,
    with_environment,
    with_table,
)
from ckptguard.values.storage_options import StorageOptions

if TYPE_CHECKING:
    from ckptguard.runs.settings_origin import Doubt

SETTINGS_FILE = "ckptguard.toml"
_HIDDEN = "***"
_PLACES = ("records", "replicas")  # URLs of storage, which hold no secret: others are refused
_warned: set[str] = set()

Say = Callable[[str], object]
"""What gets a sentence for the user."""

GivenSettings = Settings | Mapping[str, Any] | None
"""What a caller in Python may give: a dict of settings by their names, as in ``ckptguard.toml``."""


def load_settings(
    config: str | None, environ: Mapping[str, str], targets: Sequence[str], *, say: Say | None = None, **flags: object
) -> Settings:
    """Return the settings. `config` names the file; without it, ``./ckptguard.toml`` is read if it exists.

    `targets` are what the settings are for: runs, checkpoints, fleets. A file in one of them, and one that another user
    may have written, gives only `HARMLESS` settings. `say` gets one sentence about what is ignored, else a warning is
    logged once. Flags that are None were not given.

    SettingsError names the wrong source, or a ``CKPTGUARD_*`` that is no setting.
    """
    refuse_unknown(environ)
    file = _read(config, targets)
    file.report(say or warn_once)
    return file.settings(environ).changed(**flags)


def training_settings(*targets: str | os.PathLike[str]) -> Settings:
    """Return the settings inside a training that saves into `targets`. An unknown ``CKPTGUARD_*`` is only a warning.
    Raises SettingsError."""
    try:
        refuse_unknown(os.environ)
    except SettingsError as error:
        _log.warning("%s%s", error.message, f": {error.hint}" if error.hint else "")
    file = _read(None, [os.fspath(target) for target in targets])
    file.report(warn_once)
    return file.settings(os.environ)


def given_settings(given: GivenSettings, otherwise: Callable[[], Settings]) -> Settings:
    """The settings that a caller in Python means. None: those of `otherwise`; a dict changes some of these by their
    names. SettingsError for anything else."""
    if given is None:
        return otherwise()
    if isinstance(given, Settings):
        return given
    if isinstance(given, Mapping):
        return with_table(otherwise(), given, "settings")
    raise SettingsError(
        f"settings must be a dict, not {given!r:.80}", hint='name them as in ckptguard.toml: settings={"keep_good": 3}'
    )


def warn_once(sentence: str) -> None:
    """Log a warning, unless this process has logged the same one."""
    if sentence not in _warned:
        _warned.add(sentence)
        _log.warning("%s", sentence)


def ignored_settings(path: str, names: Iterable[str], doubt: Doubt) -> str:
    """Return the sentence about what is ignored in a file, why, and what to do."""
    return f"{escape(path)}: {', '.join(names)} ignored, because {doubt.why}: {doubt.remedy}"


class _File(NamedTuple):
    """What counts of a settings file, and what is ignored. `table` is empty if there is no file."""

    path: str
    table: dict[str, Any]
    ignored: tuple[str, ...] = ()
    doubt: Doubt | None = None

    def settings(self, environ: Mapping[str, str]) -> Settings:
        return with_environment(with_table(Settings(), self.table, self.path), environ)

    def report(self, say: Say) -> None:
        if self.doubt is not None and self.ignored:
            say(ignored_settings(self.path, self.ignored, self.doubt))


def _read(config: str | None, targets: Sequence[str]) -> _File:
    """Return the settings file. SettingsError if it cannot be read."""
    path = config or SETTINGS_FILE  # importing Path takes as long as loading the settings
    if config is None and not os.path.isfile(path):
        return _File(path, {})
    from ckptguard.runs.settings_origin import doubt_of_place, read_own

    text, doubt = read_own(path, "settings", named=config is not None)
    table = parse_table(text, path)
    ignored = tuple(name for name in table if name not in HARMLESS)
    if ignored and doubt is None and config is None:
        doubt = doubt_of_place(os.getcwd(), targets)
    if doubt is None:
        return _File(path, table)
    return _File(path, {name: value for name, value in table.items() if name in HARMLESS}, ignored, doubt)


class EffectiveSetting(msgspec.Struct, frozen=True, kw_only=True):
    """A setting that is in force. `source` is "flag", "environment", "file", "records" or "default"; `place` names the
    flag, the variable or the file. The value shows no secret."""

    name: str
    value: Any
    source: str
    place: str | None = None


def effective_settings(
    settings: Settings, config: str | None, environ: Mapping[str, str], targets: Sequence[str], **flags: object
) -> tuple[EffectiveSetting, ...]:
    """Every one of the `settings` that `load_settings` returned for these arguments, and which source it is from."""
    file = _read(config, targets)
    found = []
    for name in settings.__struct_fields__:
        variable = ENVIRONMENT_PREFIX + name.upper()
        source, place = ("file", file.path) if name in file.table else ("default", None)
        if flags.get(name) is not None:
            source, place = "flag", f"--{name.replace('_', '-')}"
        elif environ.get(variable):
            source, place = "environment", variable
        value = _without_secrets(name, getattr(settings, name))
        found.append(EffectiveSetting(name=name, value=value, source=source, place=place))
    return tuple(found)


def _without_secrets(name: str, value: Any) -> Any:
    """A value that may be shown. Any URL but a storage's may be a secret as a whole, as that of a chat's webhook is."""
    if isinstance(value, StorageOptions):
        return {of: dict.fromkeys(options, _HIDDEN) for of, options in value.revealed().items()}
    if isinstance(value, ReplicaPlace):
        return msgspec.to_builtins(msgspec.structs.replace(value, url=_without_secrets(name, value.url)))
    if isinstance(value, list | tuple):
        return [_without_secrets(name, one) for one in value]
    if not isinstance(value, str):
        return msgspec.to_builtins(value)
    before, mark, _ = value.partition("://")  # in an argument of a command more than a scheme
    return f"{redacted(before)}://{_HIDDEN}" if mark and name not in _PLACES else redacted(value)


def with_replicas(settings: Settings, places: str | Sequence[str]) -> Settings:
    """Return the settings with these places as replicas, if there are any."""
    return settings.changed(replicas=((places,) if isinstance(places, str) else tuple(places)) or None)
