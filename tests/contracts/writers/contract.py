"""What must hold for every layout, told by a few facts about a run that its real writer left."""

from __future__ import annotations

import fnmatch
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mishaps import MISHAPS, age
from support.faults import flip
from support.runs import QUICK
from support.views import look

from ckptguard.errors import NotFoundError
from ckptguard.records.run import open_run
from ckptguard.recover.restore import restore
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.runs.history import load_history
from ckptguard.runs.results import Checked
from ckptguard.values.ids import CheckpointId
from ckptguard.values.verdict import Outcome, Severity
from ckptguard.verification.target import Selection, verify_target

FULL = ("model", "optimizer", "scheduler", "rng")
DAMAGED = (Outcome.BAD, Outcome.INCOMPLETE)
ABSENT = ("removed", "renamed")
FIRST_SIGHT = (*ABSENT, "truncated", "emptied")


class Kind(NamedTuple):
    """A kind of run. Paths are relative to it; `path` has ``{}`` for what differs between its checkpoints."""

    name: str  # system/kind, as `written` wants it
    layout: str
    series: str
    path: str
    steps: dict[str, int]  # what stands for {} -> the step, ascending
    roles: tuple[str, ...]
    needed: tuple[str, ...] = ("*",)  # files without which it is INCOMPLETE at first sight, by pattern
    plain: tuple[str, ...] = ()  # files in which damage cannot be seen without a digest, by pattern
    beside: tuple[str, ...] = ()  # files of the checkpoint beside `path`, with {}
    others: tuple[str, ...] = ()  # series that the run has besides
    main: str = ""  # the file whose damage makes the newest bad in the test of going back; "" is the path itself

    def paths(self) -> list[str]:
        return [self.path.format(word) for word in self.steps]

    def files(self, run: Path, number: int) -> list[Path]:
        """Every file of its n-th checkpoint, not those of checkpoints nested in it."""
        word = list(self.steps)[number]
        place = run / self.path.format(word)
        beside = [run / name.format(word) for name in self.beside]
        inner = [p for p in place.iterdir() if p.is_dir() and p.name.startswith("nanoVLM")] if place.is_dir() else []
        inside = [p for p in sorted(place.rglob("*")) if p.is_file() and not any(i in p.parents for i in inner)]
        return (inside or [place]) + beside

    def earlier(self, run: Path, file: Path) -> Path:
        """The file of the checkpoint before the newest that is what `file` is in the newest."""
        before, newest = list(self.steps)[-2:]
        return run / str(file.relative_to(run)).replace(self.path.format(newest), self.path.format(before)).replace(
            f"_{newest}.yaml", f"_{before}.yaml"
        ).replace(f"global_step{newest}", f"global_step{before}")


class Contract:
    """The tests of a layout; the module that inherits them lists its kinds in KINDS."""

    def test_a_clean_run_is_good(self, kind, copied):
        """Every checkpoint is found, under its layout, series and step, GOOD, with its roles, without a warning."""
        run = copied(kind.name)
        report = verify_target(str(run), QUICK)
        assert {c.series for c in report.checkpoints} == {kind.series, *kind.others}
        own = sorted((c for c in report.checkpoints if c.series == kind.series), key=lambda c: c.step or 0)
        assert [(c.path, c.layout, c.step) for c in own] == [
            (path, kind.layout, step) for path, step in zip(kind.paths(), kind.steps.values(), strict=True)
        ]
        loud = [f for c in report.checkpoints for f in c.findings if f.severity is not Severity.NOTICE]
        assert loud == []
        assert report.outcome is Outcome.GOOD
        history = load_history(open_run(str(run)))
        for checked in own:
            verdict = history.verdict(CheckpointId(checked.series, checked.step, 1))
            assert verdict is not None
            assert set(verdict.facts.resumable) == set(kind.roles)

    def test_age_is_no_damage(self, kind, copied):
        """Old and future times, and a moved copy that keeps no time: GOOD, and no new generation."""
        run = copied(kind.name)
        age(run)
        assert verify_target(str(run), QUICK).outcome is Outcome.GOOD
        shutil.copytree(run, run.with_name("moved"), symlinks=True, copy_function=shutil.copyfile)
        report = verify_target(str(run.with_name("moved")), QUICK)
        assert report.outcome is Outcome.GOOD
        assert {c.id.generation for c in report.checkpoints if c.id} == {1}

    def test_damage_after_a_verdict_is_found(self, kind, mishap, copied):
        """Every file, every mishap, against the seal: BAD or INCOMPLETE, and the file is named."""
        run = copied(kind.name)
        verify_target(str(run), QUICK)
        met = 0
        for file, checked in _after(kind, run, mishap):
            met += 1
            assert checked is not None, f"{mishap} {file}: not seen"
            assert checked.outcome in DAMAGED, f"{mishap} {file}: {checked.outcome} {checked.findings}"
            assert _names(checked, file), f"{mishap} {file}: {checked.findings}"
        assert met or mishap == "swapped" or (mishap in ABSENT and (run / kind.paths()[-1]).is_file())

    def test_damage_at_first_sight_is_found(self, kind, mishap, copied):
        """Without records: needed files that are not there, and files that are cut."""
        run = copied(kind.name)
        for file, checked in _after(kind, run, mishap):
            if mishap in ABSENT:
                if _matches(file.name, kind.needed):
                    assert checked is None or checked.outcome in DAMAGED, f"{mishap} {file}: {checked}"
            elif not _matches(file.name, kind.plain):
                assert checked is not None, f"{mishap} {file}: not seen"
                assert checked.outcome in DAMAGED, f"{mishap} {file}: {checked.outcome} {checked.findings}"
                assert _names(checked, file), f"{mishap} {file}: {checked.findings}"


def way_back(kind: Kind, run: Path, dest: Path) -> tuple[Path, int]:
    """Damage the newest checkpoint, ask for the known-good one and restore it: where it lies now, and its step."""
    verify_target(str(run), QUICK)
    [*_, before, newest] = kind.steps
    target = run / kind.path.format(newest) / kind.main.format(newest)
    flip(target, new_times=True)
    assert verify_target(str(run), QUICK, Selection(step=kind.steps[newest])).outcome is Outcome.BAD
    found = find_known_good(open_run(str(run)), series=kind.series)
    assert found.step == kind.steps[before]
    assert Path(found.path) == run / kind.path.format(before)
    restored = restore(look(open_run(str(run))), str(dest), step=found.step)
    assert restored.series == kind.series
    for file in kind.files(run, -2):
        there = Path(restored.path).parent / _below(file, run, kind.path.format(before))
        assert there.read_bytes() == file.read_bytes()
    return Path(restored.path), kind.steps[before]


def _below(file: Path, run: Path, path: str) -> Path:
    """Where a restored file lies: the checkpoint's own folder is left out."""
    return file.relative_to((run / path).parent)


def _after(kind: Kind, run: Path, mishap: str) -> Iterator[tuple[Path, Checked | None]]:
    newest, step = kind.paths()[-1], list(kind.steps.values())[-1]
    for file in kind.files(run, -1):
        if mishap in ABSENT and file == run / newest:
            continue  # a checkpoint of one file that is gone is gone, no damage
        with MISHAPS[mishap](file, kind.earlier(run, file)) as done:
            if not done:
                continue
            try:
                report = verify_target(str(run), QUICK, Selection(step=step, record=False))
            except NotFoundError:
                yield file, None
                continue
            yield file, next((c for c in report.checkpoints if c.path == newest), None)


def _names(checked: Checked, file: Path) -> bool:
    """Whether a finding that makes it bad names the file."""
    loud = [f for f in checked.findings if f.severity is Severity.ERROR]
    return any((f.file or "").endswith(file.name) or file.name in f.message for f in loud)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
