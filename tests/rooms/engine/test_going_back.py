"""After a crash no name that a resume reads is left without good content, as long as there is any: 13 otherwise."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from support.runs import QUICK
from support.supervised_runs import save_watch
from support.trainer_saves import load, save, update_of
from support.views import look

from ckptguard.errors import NoKnownGoodError
from ckptguard.recover.roll_back import GoBack, roll_back
from ckptguard.scan import scan_files
from ckptguard.values.exit_codes import ExitCode, of_error

FIXED = ("absent", "good", "good, then torn", "good before this start, then torn", "torn at once")
NUMBERED = ("absent", "good", "good, then torn", "torn at once")


def tear(path: Path, update: int) -> None:
    """A save of which a crash left the first half, over whatever is there."""
    whole = path.parent.with_name("whole.pt")
    save(whole, update)
    data = whole.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def loads(path: Path) -> bool:
    """Whether a trainer can go on from it."""
    try:
        return update_of(load(path)) >= 0
    except (OSError, RuntimeError, EOFError, ValueError):
        return False


def contents(run: Path) -> dict[str, bytes]:
    """What every file of the trainer holds."""
    return {path.name: path.read_bytes() for path in run.glob("*.pt")}


@pytest.mark.parametrize(("fixed", "numbered", "keep"), [*itertools.product(FIXED, NUMBERED, ("copy", "none"))])
def test_a_crash_leaves_no_name_without_good_content(tmp_path, fixed, numbered, keep):
    """Either nothing is moved and the code is 13, or each name that is there loads, and what was good once still is."""
    run = tmp_path / "run"
    run.mkdir()
    watch = save_watch(str(run), QUICK.changed(keep=keep, keep_good=3), scan_files)
    watch.prepare()
    good = 0
    if "before" in fixed:
        save(run / "last.pt", good := good + 10)
        watch.last_look()
    watch.begin()
    if numbered.startswith("good"):
        save(run / "net-1.pt", good := good + 10)
    if fixed.startswith("good"):
        save(run / "last.pt", good := good + 10)
    watch.last_look()
    if numbered != "absent" and "torn" in numbered:
        tear(run / "net-2.pt", good + 10)
    if "torn" in fixed:
        tear(run / "last.pt", good + 10)
    before = contents(run)
    refused: list[NoKnownGoodError] = []
    try:
        went = watch.back.go_back([], "the command was killed by signal 9")
    except NoKnownGoodError as error:
        refused.append(error)
    if refused:
        assert of_error(refused[0]) is ExitCode.NO_KNOWN_GOOD
        assert contents(run) == before, "it says that nothing was moved"
        return
    assert all(loads(path) for path in run.glob("*.pt")), went
    if "torn" in fixed and good:
        assert loads(run / "last.pt"), "a resume that reads this name begins from scratch"
    if good:
        assert any(run.glob("*.pt"))
        assert any(words.startswith("back to ") for words in went.sentences)


@pytest.mark.parametrize(
    ("beside", "words"),
    [
        ({"iter_num": 160}, "back to ckpt.pt of iteration 160: 40 iterations are made again"),
        ({"global_step": 160}, "back to ckpt.pt of step 160: 40 steps are made again"),
        ({"epoch": 160}, "back to ckpt.pt of optimizer step 160: 40 optimizer steps are made again"),
    ],
)
def test_it_says_where_it_went_and_how_much_is_made_again(tmp_path, beside, words):
    """By the finest counter inside that both saves have."""
    run = tmp_path / "run"
    watch = save_watch(str(run), QUICK.changed(keep="copy", keep_good=3), scan_files)
    watch.prepare()
    watch.begin()
    [(name, _)] = beside.items()
    for update in (120, 160):
        save(run / "ckpt.pt", update, **{name: update})
        assert watch.last_look() == []
    save(run / "ckpt.pt", 200, sick=True, **{name: 200})
    sick = watch.last_look()
    assert words in watch.back.go_back(sick, "the command has sick saves").sentences
    assert watch.back.what_a_resume_takes() is None
    assert torch.isfinite(load(run / "ckpt.pt")["model"]["layer.weight"]).all()


@pytest.mark.parametrize("good", [True, False])
@pytest.mark.parametrize("last", ["good", "nan"])
def test_the_advice_is_a_rollback_only_where_that_has_something_to_go_back_to(tmp_path, good, last):
    """Otherwise it is what a rollback would say."""
    run = tmp_path / "run"
    watch = save_watch(str(run), QUICK.changed(keep="copy", keep_good=3), scan_files)
    watch.prepare()
    watch.begin()
    if good:
        save(run / "ckpt.pt", 10)
        watch.last_look()
    save(run / "ckpt.pt", 20, sick=last == "nan")
    watch.last_look()
    said, code = watch.back.what_a_resume_takes(), None
    try:
        roll_back(look(str(run)), GoBack(reason="test", check_writing=False, dry_run=True))
    except NoKnownGoodError as error:
        code = of_error(error)
    assert (said is None) == (last == "good")
    assert ("ckptguard rollback" in (said or "")) == (last == "nan" and code is None)
    assert said is None or code is None or "ckptguard verify" in said
