"""Load the settings: flags, else ``CKPTGUARD_*``, else the file, else defaults. The same for every door."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ckptguard.errors import SettingsError
from ckptguard.values.settings import Settings, parse_settings, refuse_unknown, with_environment, with_table

SETTINGS_FILE = "ckptguard.toml"
_LONGEST = 1 << 20
_log = logging.getLogger("ckptguard")

GivenSettings = Settings | Mapping[str, Any] | None
"""What a caller in Python may give: a dict of settings by their names, as in ``ckptguard.toml``."""


def load_settings(config: str | None, environ: Mapping[str, str], **flags: object) -> Settings:
    """The settings; `config` names the file, else ``./ckptguard.toml`` is read if it is there. Flags that are None
    were not given. SettingsError says which source is wrong, and names a ``CKPTGUARD_*`` that is no setting."""
    refuse_unknown(environ)
    return _loaded(config, environ).changed(**flags)


def training_settings() -> Settings:
    """The settings inside of a training, which nothing that is merely without effect may end. SettingsError."""
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
    path = config or SETTINGS_FILE  # no Path: loading that takes as long as loading the settings
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
    """The settings with these places for replicas, if there are any."""
    return settings.changed(replicas=((places,) if isinstance(places, str) else tuple(places)) or None)
