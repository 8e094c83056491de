"""What a fleet file says, and whose word counts."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ckptguard_daemon.http.routes import Caller
from hypothesis import given
from hypothesis import strategies as st

from ckptguard.errors import CkptguardError, NotFoundError, SettingsError
from ckptguard.fleet import FleetRules, find_runs, read_fleet
from ckptguard.fleet.find_runs import names_of, split_pattern
from ckptguard.fleet.fleet_file import FleetFile, harmless_part, parse_fleet
from ckptguard.values.access import Role
from ckptguard.values.settings import Settings

NAMES = st.sampled_from(["exp1", "exp2", "team/exp1", "team/big"])
PATTERNS = st.sampled_from(["*", "exp*", "team/*", "exp1", "/data/*", "none"])
VALUES = st.dictionaries(st.sampled_from(["keep_good", "keep_pending", "workers"]), st.integers(1, 9), max_size=3)


@given(
    name=NAMES,
    base=VALUES,
    everyone=VALUES,
    tables=st.dictionaries(PATTERNS, VALUES, max_size=4),
    environ=VALUES,
)
def test_the_nearest_word_counts(
    name: str,
    base: dict[str, int],
    everyone: dict[str, int],
    tables: dict[str, dict[str, int]],
    environ: dict[str, int],
) -> None:
    """Of every setting that of the environment counts, else of the last table that fits, else of the fleet's settings,
    else of the settings file, else the default."""
    url = f"/data/{name}"
    variables = {f"CKPTGUARD_{key.upper()}": str(value) for key, value in environ.items()}
    file = FleetFile(folders=("/data",), settings=everyone, runs=tables)
    given_settings = Settings().changed(**base)
    got = FleetRules(file=file, base=given_settings, environ=variables).settings_of(name, url)
    fitting = [t for p, t in tables.items() if fnmatchcase(name, p) or fnmatchcase(url, p)]
    for key in ("keep_good", "keep_pending", "workers"):
        words = [base, everyone, *fitting, environ]
        expected = next((w[key] for w in reversed(words) if key in w), getattr(Settings(), key))
        assert getattr(got, key) == expected


LABELLED = st.dictionaries(
    st.sampled_from(["team", "owner", "keep_good"]), st.sampled_from(["vision", "text", "vis=1"]), max_size=2
).map(lambda table: {key: len(value) if key == "keep_good" else value for key, value in table.items()})
KEYS = st.sampled_from(["*", "exp1", "team=vision", "team=vis*", "owner=text", "owner=*", "team=vis=1", "a=b", "team="])


@given(
    name=st.sampled_from(["exp1", "team=vision", "owner=text", "a=b"]),
    everyone=LABELLED,
    tables=st.dictionaries(KEYS, LABELLED, max_size=5),
)
def test_a_table_for_a_label_fits_the_runs_that_have_it_by_then(
    name: str, everyone: dict[str, Any], tables: dict[str, dict[str, Any]]
) -> None:
    """Whoever gives a folder the name of a label gets nothing by it, neither settings nor what a token may see."""
    file = FleetFile(folders=("/data",), settings=everyone, runs=tables)
    got = FleetRules(file=file, base=Settings(), environ={}).settings_of(name, f"/data/{name}")
    expected = dict(everyone)
    for key, table in tables.items():
        of_label = key.startswith(("team=", "owner="))
        own = expected.get(key.split("=")[0], "") if of_label else name
        if own and fnmatchcase(own, key.split("=", 1)[1] if of_label else key):
            expected |= table
    assert got == Settings().changed(**expected)
    watched = SimpleNamespace(name=name, url=f"/data/{name}", run_id="1", settings=got)
    sees = Caller(name="ann", role=Role.READER, runs=("team=vision", "owner=t*")).sees(watched)  # type: ignore[arg-type]
    assert sees == (got.team == "vision" or got.owner == "text")


def test_tables_apply_to_the_runs_they_name(tmp_path: Path) -> None:
    """A fleet file as a user writes it: folders beside it, patterns, settings of all and of some."""
    for name in ("runs/a/exp1", "runs/b/exp2", "runs/b/skipped"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "last.pt").write_bytes(b"x")
    file = tmp_path / "fleet.toml"
    file.write_text(
        'folders = ["runs/*/exp*"]\ndepth = 0\n[settings]\nkeep_good = 5\n[runs."b/*"]\nreplicas = ["/backup/{run}"]\n'
    )
    fleet = find_runs(str(file), Settings(), environ={"CKPTGUARD_WORKERS": "3"})
    assert [run.name for run in fleet.runs] == ["a/exp1", "b/exp2"]
    first, second = (run.settings for run in fleet.runs)
    assert first == Settings(keep_good=5, workers=3)
    assert second == Settings(keep_good=5, workers=3, replicas=("/backup/{run}",))


WRONG = {
    "not TOML": ("folders = [", "it is not valid TOML"),
    "no fleet": ("keep_good = 3", "no list of `folders`"),
    "empty": ("", "no list of `folders`"),
    "no folders": ("folders = []", "at least one folder"),
    "wrong type": ('folders = "runs"', "folders must be a list"),
    "depth": ('folders = ["a"]\ndepth = 99', "depth must be between 0 and 8"),
    "no size": ('folders = ["a"]\nkeep_bytes = "2XB"', "keep_bytes: '2XB' is no size"),
    "size type": ('folders = ["a"]\nkeep_bytes = ["2TB"]', 'keep_bytes must be a size, such as "2TB"'),
    "depth type": ('folders = ["a"]\ndepth = "x"', "depth must be a whole number"),
    "a key that went": ('folders = ["a"]\nmatch = ["*"]', "write its patterns into `folders`"),
    "unknown key": ('folders = ["a"]\ndept = 1', "there is no key 'dept'"),
    "unknown setting": ('folders = ["a"]\n[settings]\nkeep_god = 1', "there is no setting 'keep_god'"),
    "a run's setting": ('folders = ["a"]\n[runs."x*"]\nkeep_good = "many"', r"x\*.*keep_good must be a whole number"),
    "no table": ('folders = ["a"]\n[runs]\nx = 1', "runs must be tables of settings"),
    "binary": ("\x00\x01", "not valid TOML"),
}


def test_another_users_file_gives_no_budget() -> None:
    """A budget removes checkpoints, so it counts only in a file of one's own."""
    counted, ignored = harmless_part(parse_fleet('folders = ["/a"]\nkeep_bytes = "2TB"', "/f.toml"))
    assert (counted.keep_bytes, ignored) == (None, ("keep_bytes",))


@pytest.mark.parametrize(("text", "sentence"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_file_gets_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    """A mistake is told when the file is read, with the file's name, also in a table that fits no run yet."""
    file = tmp_path / "fleet.toml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=sentence) as told:
        read_fleet(str(file), Settings())
    assert str(file) in told.value.message
    assert "\n" not in told.value.message


def test_what_is_no_file_at_all_gets_one_sentence(tmp_path: Path) -> None:
    """A checkpoint, a socket, bytes that are no text, and nothing."""
    (tmp_path / "model.pt").write_bytes(b"PK\x03\x04\xff\xfe")
    with pytest.raises(SettingsError, match="not UTF-8"):
        read_fleet(str(tmp_path / "model.pt"), Settings())
    with pytest.raises(SettingsError, match="neither a folder nor a fleet file"):
        read_fleet("/dev/null", Settings())
    with pytest.raises(NotFoundError, match="no folder or fleet file"):
        read_fleet(str(tmp_path / "nothing"), Settings())
    (tmp_path / "huge.toml").write_bytes(b"#" * (2 << 20))
    with pytest.raises(SettingsError, match="too large"):
        read_fleet(str(tmp_path / "huge.toml"), Settings())


@given(text=st.text(max_size=60))
def test_any_text_is_a_fleet_or_a_sentence(text: str) -> None:
    """No text makes anything but a fleet or one of our errors."""
    try:
        said = "fleet.toml" if parse_fleet(text, "fleet.toml").folders else ""
    except CkptguardError as error:
        said = error.message
    assert said.startswith("fleet.toml")


@given(found=st.dictionaries(st.text(min_size=1, max_size=3), st.sampled_from(["a", "b", "c"])))
def test_no_two_runs_have_one_name(found: dict[str, str]) -> None:
    """A name is of one run alone, whatever the folders are called."""
    names = names_of({f"/{url}": name for url, name in found.items()})
    assert len(set(names.values())) == len(found)


def test_a_pattern_needs_a_place_to_list() -> None:
    """What could only be searched from a whole account is refused."""
    assert split_pattern("s3://bucket/team-*/runs") == ("s3://bucket", ("team-*", "runs"))
    assert split_pattern("/none/*/x") == ("/none", ("*", "x"))
    for place in ("s3://buck*/x", "/none/**"):
        with pytest.raises(SettingsError, match="cannot be searched"):
            split_pattern(place)
