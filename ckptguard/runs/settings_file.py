"""Load the settings for every door: flags first, then ``CKPTGUARD_*``, then the file, then defaults."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from ckptguard.errors import SettingsError
from ckptguard.storage.redaction import redacted
from ckptguard.values.settings import (
    ENVIRONMENT_PREFIX,
    Settings,
    names_in,
    parse_settings,
    refuse_unknown,
    with_environment,
    with_table,
)
from ckptguard.values.storage_options import StorageOptions

SETTINGS_FILE = "ckptguard.toml"
_HIDDEN = "***"
_PLACES = ("records", "replicas")  # URLs of storage, which hold no secret: others are refused
_LONGEST = 1 << 20
_log = logging.getLogger("ckptguard")

GivenSettings = Settings | Mapping[str, Any] | None
"""What a caller in Python may give: a dict of settings by their names, as in ``ckptguard.toml``."""


def load_settings(config: str | None, environ: Mapping[str, str], **flags: object) -> Settings:
    """Return the settings. `config` names the file; without it, ``./ckptguard.toml`` is read if it exists.

    Flags that are None were not given. SettingsError names the wrong source, or a ``CKPTGUARD_*`` that is no setting.
    """
    refuse_unknown(environ)
    return _loaded(config, environ).changed(**flags)


def training_settings() -> Settings:
    """Return the settings inside a training. An unknown ``CKPTGUARD_*`` is only a warning. Raises SettingsError."""
    try:
        refuse_unknown(os.environ)
    except SettingsError as error:
        _log.warning("%s%s", error.message, f": {error.hint}" if error.hint else "")
    return _loaded(None, os.environ)


def given_settings(given: GivenSettings, otherwise: Callable[[], Settings] = training_settings) -> Settings:
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


def _loaded(config: str | None, environ: Mapping[str, str]) -> Settings:
    path, text = _read(config)
    return with_environment(Settings() if text is None else parse_settings(text, path), environ)


def _read(config: str | None) -> tuple[str, str | None]:
    """Return the path of the settings file, and its text if there is one. SettingsError if it cannot be read."""
    path = config or SETTINGS_FILE  # importing Path takes as long as loading the settings
    try:
        if config is None and not os.path.isfile(path):
            return path, None
        with open(path, "rb") as file:
            text = file.read(_LONGEST + 1)
        if len(text) > _LONGEST:
            raise SettingsError(f"{path} is too large for a settings file")
        return path, text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path} is not UTF-8 text") from error
    except OSError as error:
        raise SettingsError(f"cannot read the settings in {path}: {error.strerror}") from error


class EffectiveSetting(msgspec.Struct, frozen=True, kw_only=True):
    """A setting that is in force. `source` is "flag", "environment", "file", "records" or "default"; `place` names the
    flag, the variable or the file. The value shows no secret."""

    name: str
    value: Any
    source: str
    place: str | None = None


def effective_settings(config: str | None, environ: Mapping[str, str], **flags: object) -> tuple[EffectiveSetting, ...]:
    """Every setting with its value, and which source it is from. SettingsError, as `load_settings`."""
    settings = load_settings(config, environ, **flags)
    path, text = _read(config)
    in_file = names_in(text) if text is not None else frozenset()
    found = []
    for name in settings.__struct_fields__:
        variable = ENVIRONMENT_PREFIX + name.upper()
        source, place = ("file", path) if name in in_file else ("default", None)
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
    if isinstance(value, list | tuple):
        return [_without_secrets(name, one) for one in value]
    if not isinstance(value, str):
        return msgspec.to_builtins(value)
    before, mark, _ = value.partition("://")  # in an argument of a command more than a scheme
    return f"{redacted(before)}://{_HIDDEN}" if mark and name not in _PLACES else redacted(value)


def with_replicas(settings: Settings, places: str | Sequence[str]) -> Settings:
    """Return the settings with these places as replicas, if there are any."""
    return settings.changed(replicas=((places,) if isinstance(places, str) else tuple(places)) or None)
