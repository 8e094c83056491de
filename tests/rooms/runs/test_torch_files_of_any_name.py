"""Files that torch wrote are checkpoints, whatever their names say: they are known by their first bytes."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch
from support.runs import QUICK, state_dict
from support.views import look

from ckptguard.records.kept import list_kept
from ckptguard.recover.roll_back import GoBack, roll_back
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.upkeep.finish_copies import protect, waiting_alone
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.ids import Step
from ckptguard.values.verdict import Outcome
from ckptguard.verification.checkpoint import verify_kept
from ckptguard.verification.target import verify_target


def save(path: Path, *, poisoned: bool = False) -> Path:
    """A save by torch."""
    path.parent.mkdir(parents=True, exist_ok=True)
    state = state_dict(1)
    if poisoned:
        state["embed.weight"][0, 0] = math.nan
    torch.save({"generator": state}, path)
    return path


def found(root: Path) -> dict[str, tuple[str, Step]]:
    """{path: (series, step)} of a run."""
    return {c.path: (c.series, c.step) for c in look(str(root)).checkpoints}


def outcomes(root: Path) -> dict[str, Outcome]:
    """What `verify RUN` says, by path."""
    return {c.path: c.outcome for c in verify_target(str(root), QUICK).checkpoints}


def test_names_of_real_trainers(tmp_path: Path) -> None:
    """HiFi-GAN, BasicSR and demucs: each has its series and its step. What torch did not write is no checkpoint."""
    names = {
        "g_00000300": ("g_#", 300),
        "do_00000300": ("do_#", 300),
        "training_states/700.state": ("training_states/#.state", 700),
        "models/net_g_700.pth": ("models/net_g_#.pth", 700),
        "checkpoint_30.th": ("checkpoint_#.th", 30),
        "best.th": ("best.th", None),
    }
    for name in names:
        save(tmp_path / name)
    (tmp_path / "g_00000400").write_bytes(b"PK\x03\x04" + bytes(5000))
    (tmp_path / "d_00000300").write_bytes(os.urandom(5000))
    (tmp_path / "config.json").write_text("{}" * 2000)
    assert found(tmp_path) == names
    assert set(outcomes(tmp_path).values()) == {Outcome.GOOD}
    unread = look(str(tmp_path)).listing.not_understood
    assert unread is not None
    # Of the series of a sealed file, so a checkpoint now.
    assert unread.paths == ("d_00000300",)


@pytest.mark.parametrize("name", ["g_00000{}", "states/{}.state", "checkpoint_{}.th"])
def test_they_are_judged_like_any_other(tmp_path: Path, name: str) -> None:
    """NaN is bad, rollback moves it aside, and what is left is known-good."""
    for step in (100, 200, 300):
        save(tmp_path / name.format(step), poisoned=step == 300)
    last, good = name.format(300), name.format(200)
    assert outcomes(tmp_path) == {
        name.format(100): Outcome.GOOD,
        good: Outcome.GOOD,
        last: Outcome.BAD,
    }
    done = roll_back(look(str(tmp_path)), GoBack(reason="test", check_writing=False))
    assert (done.quarantined, done.known_good.path) == ((last,), str(tmp_path / good))
    assert not (tmp_path / last).exists()
    assert find_known_good(look(str(tmp_path)).run).path == str(tmp_path / good)


@pytest.mark.parametrize(
    "harm",
    [
        lambda whole: b"\0" * 4 + whole[4:],
        lambda whole: whole[: len(whole) // 2],
        lambda whole: whole[:500],
        lambda whole: b"",
        lambda whole: whole[:3000] + bytes([whole[3000] ^ 1]) + whole[3001:],
    ],
    ids=["first bytes", "half", "nearly nothing", "nothing", "a bit"],
)
def test_what_was_sealed_stays_a_checkpoint(tmp_path: Path, harm) -> None:  # type: ignore[no-untyped-def]
    """Also where damage took the bytes by which it was known."""
    path = save(tmp_path / "g_00000300")
    assert outcomes(tmp_path) == {path.name: Outcome.GOOD}
    before = path.stat()
    path.write_bytes(harm(path.read_bytes()))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert outcomes(tmp_path) == {path.name: Outcome.BAD}


def test_a_file_cut_at_first_sight_is_not_good(tmp_path: Path) -> None:
    """By a killed writer; its end is missing, but its beginning says what it is."""
    path = save(tmp_path / "do_00000300")
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 38 // 100])
    [waiting] = reconcile(look(str(tmp_path), QUICK.changed(settle=5.0)), PassNotes()).pending
    assert waiting.reason == "do_00000300 is not complete yet"
    assert outcomes(tmp_path)[path.name] in (Outcome.BAD, Outcome.INCOMPLETE)


def test_kept_copies_and_passes(tmp_path: Path) -> None:
    """A pass protects them, and a copy whose save was rotated away is judged."""
    settings = QUICK.changed(keep="link")
    path = save(tmp_path / "g_00000300")
    view = look(str(tmp_path), settings)
    assert protect(view, [(c, True) for c in view.checkpoints]) == []
    path.unlink()
    [copy] = waiting_alone(look(str(tmp_path), settings))
    judged = verify_kept(look(str(tmp_path), settings), copy)
    assert judged is not None
    assert judged.outcome is Outcome.GOOD
    save(tmp_path / "g_00000400")
    [checked] = reconcile(look(str(tmp_path), settings), PassNotes()).checked
    assert (checked.path, checked.step, checked.outcome) == ("g_00000400", 400, Outcome.GOOD)
    assert [id.step for id in list_kept(look(str(tmp_path)).run)] == [300, 400]
