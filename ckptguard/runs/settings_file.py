"""Load the settings for every door: flags first, then ``CKPTGUARD_*``, then the file, then defaults."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence

from ckptguard.errors import SettingsError
from ckptguard.values.settings import Settings, parse_settings, refuse_unknown, with_environment

SETTINGS_FILE = "ckptguard.toml"
_LONGEST = 1 << 20
_log = logging.getLogger("ckptguard")


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


def _loaded(config: str | None, environ: Mapping[str, str]) -> Settings:
    path = config or SETTINGS_FILE  # importing Path takes as long as loading the settings
    settings = Settings()
    try:
        if config is not None or os.path.isfile(path):
            with open(path, "rb") as file:
                text = file.read(_LONGEST + 1)
            if len(text) > _LONGEST:
                raise SettingsError(f"{path} is too large for a settings file")
            settings = parse_settings(text.decode("utf-8"), path)
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path} is not UTF-8 text") from error
    except OSError as error:
        raise SettingsError(f"cannot read the settings in {path}: {error.strerror}") from error
    return with_environment(settings, environ)


def with_replicas(settings: Settings, places: str | Sequence[str]) -> Settings:
    """Return the settings with these places as replicas, if there are any."""
    return settings.changed(replicas=((places,) if isinstance(places, str) else tuple(places)) or None)
