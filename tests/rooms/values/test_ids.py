"""Names, ids and paths."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptguard.values.ids import (
    CheckpointId,
    escape,
    is_safe_path,
    is_temporary,
    parse_id,
    series_folder,
    series_from_folder,
    series_of,
)


@given(st.one_of(st.none(), st.integers(0, 10**12 - 1)), st.integers(1, 10**6))
def test_both_forms_of_an_id_parse_to_the_same(step, generation):
    """The form for people and the form of records mean the same generation."""
    id = CheckpointId("net-#.pt", step, generation)
    assert parse_id("net-#.pt", str(id)) == parse_id("net-#.pt", id.record_name) == id


@given(st.text(min_size=1, max_size=40).filter(lambda t: t.isprintable()))
def test_a_series_folder_is_one_plain_name_and_reversible(series):
    """Folders of series hold no separators, and lead back to the series."""
    folder = series_folder(series)
    assert "/" not in folder
    assert folder.isascii()
    assert series_from_folder(folder) == series


def test_series_replaces_digit_runs():
    """The examples of the design."""
    assert series_of("checkpoint-500") == "checkpoint-#"
    assert series_of("modules/net-500.pth") == "modules/net-#.pth"
    assert series_of("last.ckpt") == "last.ckpt"


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../x", "a/../b", "a//b", "./a", "a/.", "s3://b/k", "a\0b", "a/"])
def test_paths_that_lead_anywhere_else_are_unsafe(path):
    """Absolute, climbing, unnormalised paths, URLs and NUL are refused."""
    assert not is_safe_path(path)


def test_plain_relative_paths_are_safe():
    """What checkpoints really hold. A tilde leads to no home: paths are joined to a folder."""
    assert all(
        is_safe_path(p)
        for p in ("~.pt", "~/x", "a", "checkpoint-500/model.safetensors", "a b/ü.pt", "..a/b..", "back\\slash")
    )


def test_temporaries_are_known_by_name():
    """Writers' temporaries belong to no checkpoint."""
    assert all(is_temporary(n) for n in (".tmpAbC", "x.tmp", "tmp-checkpoint-5"))
    assert not any(is_temporary(n) for n in ("model.safetensors", "tmpfile.pt", "atmp"))


def test_escape_leaves_nothing_that_moves_a_cursor_or_turns_text():
    """Control characters, newlines and right-to-left marks come out as escapes."""
    shown = escape("a\x1b[31m\nb\u202ec\udc80")
    assert shown == "a\\u001b[31m\\u000ab\\u202ec\\udc80"
