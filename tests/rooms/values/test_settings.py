"""Settings: from TOML and environment, refusing nonsense."""

import pytest

from ckptguard.errors import SettingsError
from ckptguard.values.retention_policy import Best, Policy
from ckptguard.values.settings import Settings, parse_settings, with_environment


def test_toml_and_environment():
    """The environment wins over the file; lists are separated by commas."""
    settings = parse_settings('settle = 2\nkeep = "copy"\non_incident = ["notify", "-v"]', "ckptguard.toml")
    assert (settings.settle, settings.keep, settings.on_incident) == (2.0, "copy", ("notify", "-v"))
    changed = with_environment(settings, {"CKPTGUARD_SETTLE": "0.5", "CKPTGUARD_ALLOW_NONFINITE": "a.*,b", "HOME": "/"})
    assert (changed.settle, changed.keep, changed.allow_nonfinite) == (0.5, "copy", ("a.*", "b"))


@pytest.mark.parametrize(
    "text",
    ["settle = -1", "settle = nan", "keep_good = 0", 'keep = "links"', "colour = 1", 'settle = "soon"', "settle = ",
     'webhook = "ftp://x"', "worker_memory = 1", "scan_interval = 0", "keep_pending = 0",
     'digest = "sha1"', 'executor = "gpu"', "workers = -1", "niceness = 20", "niceness = -1", "verify_rate = 1000",
     "verify_rate = nan", "verify_rate = inf", "keep_last = 0", "keep_every = -5", 'keep_within = "soon"',
     "keep_within = 0", 'keep_best = ["loss"]', 'trash_grace = "-1d"',
     'replicas = [""]', 'replicas = ["/mnt/{runs}"]'],
)  # fmt: skip
def test_nonsense_is_refused_with_the_source(text):
    """Impossible values, unknown names and broken TOML name the file."""
    with pytest.raises(SettingsError) as caught:
        parse_settings(text, "ckptguard.toml")
    assert caught.value.message


def test_none_leaves_what_was():
    """Flags that were not given change nothing."""
    assert Settings().changed(settle=None, keep_good=3) == Settings(keep_good=3)


def test_retention_of_a_run():
    """Its rules are those of the settings. Spans of time are seconds or words, also in the environment."""
    text = 'keep_last = 3\nkeep_within = "2d"\nkeep_best = ["loss:min:2"]'
    settings = parse_settings(text, "ckptguard.toml")
    assert settings.retention() == Policy(keep_last=3, keep_within=172800.0, keep_best=(Best("loss", "min", 2),))
    changed = with_environment(settings, {"CKPTGUARD_KEEP_WITHIN": "60", "CKPTGUARD_TRASH_GRACE": "12h"})
    assert changed.retention().keep_within == 60.0
    assert Settings().retention().asks_nothing
