"""Which runs one daemon may guard together."""

from __future__ import annotations

from collections.abc import Sequence

from ckptguard.errors import SettingsError
from ckptguard.storage import normalise_url
from ckptguard.values.settings import Settings


def distinct_urls(runs: Sequence[str], settings: Settings) -> tuple[str, ...]:
    """The normalised URLs of the runs, each once; SettingsError if they would share one place for records."""
    urls = tuple(dict.fromkeys(normalise_url(run) for run in runs))
    if settings.records is not None and len(urls) > 1:
        raise SettingsError(
            "`records` names one place, but there are several runs", hint="start one daemon for each run"
        )
    return urls
