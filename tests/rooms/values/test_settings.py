"""Settings: from TOML and environment, refusing nonsense."""

import json
import os
import re
import subprocess
from pathlib import Path

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ckptguard.errors import SettingsError
from ckptguard.runs.settings_file import load_settings, training_settings
from ckptguard.values.patterns import Pattern
from ckptguard.values.retention_policy import Best, Policy
from ckptguard.values.settings import Settings, environment_of, parse_settings, refuse_unknown, with_environment


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
     'digest = "sha1"', "workers = -1", "verify_rate = 1000",
     "verify_rate = nan", "verify_rate = inf", "keep_last = 0", "keep_every = -5", 'keep_within = "soon"',
     "keep_within = 0", 'keep_best = ["loss"]', 'trash_grace = "-1d"',
     'replicas = [""]', 'replicas = ["/mnt/{runs}"]'],
)  # fmt: skip
def test_nonsense_is_refused_with_the_source(text):
    """Impossible values, unknown names and broken TOML name the file."""
    with pytest.raises(SettingsError) as caught:
        parse_settings(text, "ckptguard.toml")
    assert caught.value.message


def test_settings_that_went_say_nothing():
    """A file or an environment that an older release reads, too, is no mistake."""
    assert parse_settings('executor = "gpu"\nniceness = 0\nkeep_good = 3', "x") == Settings(keep_good=3)
    environ = {"CKPTGUARD_EXECUTOR": "processes", "CKPTGUARD_NICENESS": "x"}
    refuse_unknown(environ)
    assert with_environment(Settings(), environ) == Settings()


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


def variables_of_the_project():
    """Every ``CKPTGUARD_*`` that any file of the project names, this one apart."""
    root = Path(__file__).parents[3]
    listed = subprocess.run(["git", "-C", root, "ls-files", "-z"], capture_output=True, text=True, check=False).stdout
    files = [root / name for name in listed.split("\0") if name] or [p for p in root.rglob("*.*") if p.is_file()]
    found = set()
    for path in files:
        if path.suffix in (".py", ".md", ".toml", ".yml", ".service") and path != Path(__file__) and path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            found |= set(re.findall(r"\bCKPTGUARD_[A-Z][A-Z_]*[A-Z]\b", text))
    return found


def test_no_variable_of_the_project_is_taken_for_a_mistake():
    """Those of the tests and commands are no settings, and refused by none."""
    named = variables_of_the_project()
    assert {"CKPTGUARD_SETTLE", "CKPTGUARD_DEBUG", "CKPTGUARD_TORCH"} <= named
    refuse_unknown(dict.fromkeys(named, "1"))


@given(st.sampled_from([f.name for f in msgspec.structs.fields(Settings)]), st.data())
def test_a_mistyped_variable_is_refused_with_the_name_that_was_meant(name, data):
    """One letter is missing or too much: the variable would be without effect. An empty one counts as not set."""
    right = f"CKPTGUARD_{name.upper()}"
    at = data.draw(st.integers(len("CKPTGUARD_"), len(right) - 1))
    wrong = data.draw(st.sampled_from([right[:at] + right[at + 1 :], right[:at] + "X" + right[at:]]))
    assume(not hasattr(Settings, wrong.removeprefix("CKPTGUARD_").lower()))
    with pytest.raises(SettingsError) as caught:
        refuse_unknown({wrong: "1", "HOME": "/"})
    assert wrong in caught.value.message
    meant = caught.value.hint.removeprefix("did you mean ").removesuffix("?")
    assert meant == right or hasattr(Settings, meant.removeprefix("CKPTGUARD_").lower())
    refuse_unknown({wrong: ""})


def test_inside_a_training_an_unknown_variable_is_a_warning(monkeypatch, tmp_path, caplog):
    """On the command line it is a refusal; a training goes on, with what else is set."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CKPTGUARD_KEEP_GOD", "9")
    monkeypatch.setenv("CKPTGUARD_SETTLE", "7")
    assert training_settings().settle == 7.0
    assert "did you mean CKPTGUARD_KEEP_GOOD?" in caplog.text
    with pytest.raises(SettingsError, match="CKPTGUARD_KEEP_GOD"):
        load_settings(None, os.environ, [])


texts = st.lists(st.text(min_size=1).filter(lambda t: "\0" not in t), max_size=3).map(tuple)


@given(allow=texts, command=texts, places=st.lists(st.sampled_from(["/a,b", "s3://x/{run}", "c d"]), max_size=2))
def test_lists_come_through_the_environment_as_they_were(allow, command, places):
    """What is handed to another process arrives there, commas, brackets and quotes too; nothing else of ours does."""
    pattern = Pattern(path="[ab]*,x", step=r"(\d+),")
    settings = Settings(
        allow_nonfinite=allow, on_incident=command, replicas=tuple(places), patterns=(pattern,), settle=2
    )
    inherited = {
        "CKPTGUARD_SETTLE": "9",
        "CKPTGUARD_SETLE": "9",
        "CKPTGUARD_KEEP": "copy",
        "HOME": "/",
        "CKPTGUARD_DEBUG": "1",
    }
    environ = environment_of(settings, inherited)
    refuse_unknown(environ)
    assert with_environment(Settings(), environ) == settings
    assert (environ["HOME"], environ["CKPTGUARD_DEBUG"]) == ("/", "1")


def test_a_list_is_json_or_commas():
    """Text that begins as JSON is JSON or refused: a path or pattern is never made of a piece of it."""
    read = lambda text: with_environment(Settings(), {"CKPTGUARD_REPLICAS": text}).replicas  # noqa: E731
    assert read('["/a,b", "/c"]') == ("/a,b", "/c")
    assert read("/a,/c") == ("/a", "/c")
    for text in ("[/a,/b]", '["/a", "/b"', '["/a", 5]', "[" * 5000, '["[/a"]'):
        with pytest.raises(SettingsError) as caught:
            read(text)
        assert "CKPTGUARD_REPLICAS" in caught.value.message or "not a path or URL" in caught.value.message
    for wrong in ({"records": "[/a]"}, {"replicas": ("[x",)}):
        with pytest.raises(SettingsError, match="not a path or URL"):
            Settings(**wrong)


# What msgspec, tomllib and re say; none of it is ours.
FOREIGN = re.compile(
    r"Expected|Object |unknown field|\$\.|`|unterminated|JSON is malformed|nothing to repeat|Invalid |Unclosed|Struct"
)
PATTERNS = ({}, {"path": "a", "step": "("}, {"path": 5}, {"paths": "x"})
values = st.one_of(
    st.booleans(),
    st.integers(-5, 5),
    st.text(st.characters(exclude_characters="`$"), max_size=5),  # a message quotes the value
    st.lists(st.integers(), max_size=2),
    st.sampled_from([[pattern] for pattern in PATTERNS]),
    st.just({"a": 1}),
)


def refusal(read):
    """What a reading of settings says against them, if anything."""
    try:
        read()
    except SettingsError as error:
        return error.message
    return None


@given(st.sampled_from([f.name for f in msgspec.structs.fields(Settings)] + ["colour"]), values)
def test_messages_are_in_our_words(name, value):
    """Whatever stands in the file, what is wrong is said with the file's and the setting's name, not by a parser."""
    text = f"{name} = {json.dumps(value)}" if not isinstance(value, dict) else f"[{name}]\na = 1"
    for each in (text, text[:-1], f"[[{name}]]\npath = {json.dumps(value)}"):
        said = refusal(lambda text=each: parse_settings(text, "x.toml"))
        if said is not None:
            assert said.startswith("x.toml")
            assert name in said or "TOML" in said or "pattern" in said
            assert not FOREIGN.search(said), said
    environ = {f"CKPTGUARD_{name.upper()}": json.dumps(value)}
    assert not FOREIGN.search(refusal(lambda: with_environment(Settings(), environ)) or "")


def test_an_address_is_never_quoted():
    """Neither a wrong one nor one in the wrong place shows its token; one alone needs no list."""
    assert parse_settings('notify = "slack://token"', "x").notify == ("slack://token",)
    for text in ('notify = "hidden"', "notify = [1]", 'notify = ["slack://a", "hidden"]', 'webhook = "ftp://hidden"'):
        with pytest.raises(SettingsError) as caught:
            parse_settings(text, "x")
        assert "hidden" not in f"{caught.value.message} {caught.value.hint}"
    settings = Settings(notify=("slack://hidden",), webhook="https://hidden", settle=1.0)
    assert "hidden" not in repr(settings)
    assert "settle=1.0" in repr(settings)


def test_addresses_with_commas_are_a_json_list_in_the_environment():
    """The error says so."""
    with pytest.raises(SettingsError) as caught:
        with_environment(Settings(), {"CKPTGUARD_NOTIFY": "mailto://me@x?to=a,b"})
    assert "JSON" in caught.value.hint
    found = with_environment(Settings(), {"CKPTGUARD_NOTIFY": '["mailto://me@x?to=a,b"]'})
    assert found.notify == ("mailto://me@x?to=a,b",)
