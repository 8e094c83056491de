"""Known-good names the bytes that were judged: no write that hides gets by, and nothing harmless is an alarm."""

from __future__ import annotations

import hashlib
import mmap
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.tiny_run import TINY, WEIGHTS, cycle, inline, name_of, save
from support.views import look

from ckptguard.cli.commands.known_good import known_good as command
from ckptguard.engine.gate import gate
from ckptguard.errors import NoKnownGoodError
from ckptguard.records.after_seal import read_ctimes
from ckptguard.records.run import open_run
from ckptguard.runs.find_known_good import ANY, Wanted, best_on_record, openable
from ckptguard.runs.work import Work
from ckptguard.values.exit_codes import ExitCode
from ckptguard.values.ids import CheckpointId
from ckptguard.values.verdict import Outcome
from ckptguard.verification.read_known_good import read_known_good

STEPS = (100, 200, 300)


def changed(data: bytes, at: int) -> bytes:
    """The same with another byte among the weights. No second change takes it back."""
    other = bytearray(data)
    place = len(data) - 1 - at % 64
    other[place] = (other[place] + 1) % 256
    return bytes(other)


def store_by_mmap(path: Path, data: bytes) -> None:
    """Write through a memory map."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as pages:
        pages[:] = data
        pages.flush()


def write(path: Path, data: bytes) -> None:
    """Write into the file that lies there."""
    with path.open("r+b") as file:
        file.write(data)


def cut_and_extend(path: Path, data: bytes) -> None:
    """Cut the file off, and make it as long as before."""
    os.truncate(path, len(data) - 96)
    os.truncate(path, len(data))


def replace(path: Path, data: bytes) -> None:
    """Another file gets the name."""
    beside = path.with_name("tmp-new")
    beside.write_bytes(data)
    beside.replace(path)


def write_elsewhere(path: Path, data: bytes) -> None:
    """Write to a hard link outside of the run."""
    link = path.parent.parent.with_name(f"link-{path.parent.name}")
    link.unlink(missing_ok=True)
    os.link(path, link)
    write(link, data)


DAMAGES = (store_by_mmap, write, cut_and_extend, replace, write_elsewhere)


def change_mode(path: Path) -> None:
    """Nothing but its mode."""
    path.chmod(path.stat().st_mode ^ 0o020)


def change_owner(path: Path) -> None:
    """To whom it belongs already."""
    os.chown(path, path.stat().st_uid, path.stat().st_gid)


def link(path: Path) -> None:
    """One more link, which stays."""
    other = path.parent.parent.with_name(f"backup-{path.parent.name}-{path.stat().st_ctime_ns}")
    os.link(path, other)


def link_and_unlink(path: Path) -> None:
    """As a backup does."""
    os.link(path, path.with_name("tmp-link"))
    path.with_name("tmp-link").unlink()


def rename_and_back(path: Path) -> None:
    """Away, and back again."""
    path.rename(path.with_name("tmp-away"))
    path.with_name("tmp-away").rename(path)


def same_times(path: Path) -> None:
    """Its own times once more."""
    os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))


INNOCENT = (change_mode, change_owner, link, link_and_unlink, rename_and_back, same_times, Path.touch)


class WatchedFolder:
    """A run of verified saves; what was saved by the test's own account, and how often something was read."""

    def __init__(self, root: Path, keep: str) -> None:
        self.root, self.settings, self.reads = root, TINY.changed(keep=keep), 0
        for step in STEPS:
            save(str(root), step, step)
            cycle(open_run(str(root)), self.settings)
        self.sealed_at = {step: self.weights(step).stat().st_mtime_ns for step in STEPS}
        self.saved = {step: digest(self.weights(step)) for step in STEPS}
        self._clock, self._damages = root.parent / "clock", 0
        self._clock.touch()

    def weights(self, step: int) -> Path:
        """The file of a step."""
        return self.root / name_of(step) / WEIGHTS

    def damage(self, how: Callable[[Path, bytes], None], step: int) -> None:
        """Other bytes, of the same size and with the time of the seal."""
        self.tick()
        path = self.weights(step)
        self._damages += 1
        how(path, changed(path.read_bytes(), self._damages))
        os.utime(path, ns=(path.stat().st_atime_ns, self.sealed_at[step]))

    def touch(self, how: Callable[[Path], None], step: int) -> None:
        """Something that changes no byte."""
        self.tick()
        how(self.weights(step))

    def copy(self) -> None:
        """The run on another machine: all inodes and ctimes are others."""
        self.tick()
        copied = self.root.with_name(f"{self.root.name}-copy")
        subprocess.run(["cp", "-a", str(self.root), str(copied)], check=True)
        shutil.rmtree(self.root)
        self.root = copied

    def tick(self) -> None:
        """Wait until the file system's clock tells what comes from what was."""
        before = max(path.stat().st_ctime_ns for path in (*self.root.rglob("*"), self._clock))
        while self._clock.stat().st_ctime_ns <= before:
            os.utime(self._clock)

    def scan(self, *arguments: object) -> object:
        """A scanner that counts."""
        self.reads += 1
        return inline(*arguments)

    def expected(self) -> int | None:
        """The newest step of which somebody still has the bytes that were saved."""
        kept = {digest(path) for path in self.root.glob("_ckptguard/kept/**/*")}
        there = (step for step in reversed(STEPS) if self.saved[step] in {digest(self.weights(step)), *kept})
        return next(there, None)

    def ask(self, *, everything: bool = False, before_step: int | None = None) -> tuple[int, str] | None:
        """`ckptguard.known_good`."""
        view = look(str(self.root), self.settings)
        wanted = Wanted(before_step=before_step)
        found = read_known_good(view, wanted, Work(scanner=self.scan), everything=everything)
        return None if found is None else self.named(openable(found.answer).path)

    def ask_command(self) -> tuple[int, str] | None:
        """`ckptguard known-good`."""
        with mock.patch("ckptguard.scan.scanner_of", return_value=self.scan):
            done = CliRunner().invoke(command, [str(self.root)])
        if done.exit_code == ExitCode.NO_KNOWN_GOOD or isinstance(done.exception, NoKnownGoodError):
            return None
        assert done.exit_code == 0, done.output
        return self.named(done.stdout.strip())

    def gate(self) -> int | None:
        """The step that `ckptguard gate --dry-run` would start a training from."""
        view = look(str(self.root), self.settings)
        try:
            found = gate(view, attempts=9, dry_run=True, work=Work(scanner=self.scan)).known_good
        except NoKnownGoodError:
            return None
        return found and found.id.number

    def named(self, folder: str) -> tuple[int, str]:
        """What lies at a path."""
        return int(Path(folder).name.rpartition("-")[2]), digest(Path(folder, WEIGHTS))

    def check(self) -> None:
        """Every door names the newest bytes that are those that were saved."""
        step = self.expected()
        right = None if step is None else (step, self.saved[step])
        assert self.gate() == step
        assert self.ask() == right
        assert self.ask_command() == right
        assert self.ask(everything=True) == right

    def bad(self) -> set[int]:
        """The steps that the records call bad."""
        history = look(str(self.root)).history
        return {
            step
            for step in STEPS
            if (current_verdict := history.current_verdict(CheckpointId("model-#", step, 1)))
            and current_verdict.outcome is Outcome.BAD
        }


def digest(path: Path) -> str:
    """The independent judge."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


DONE = st.one_of(
    st.tuples(st.just("damage"), st.sampled_from(DAMAGES), st.sampled_from(STEPS)),
    st.tuples(st.just("touch"), st.sampled_from(INNOCENT), st.sampled_from(STEPS)),
    st.tuples(st.sampled_from(["copy", "ask", "pass"]), st.none(), st.just(0)),
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(keep=st.sampled_from(["none", "link", "copy"]), done=st.lists(DONE, min_size=1, max_size=6))
def test_known_good_names_the_bytes_that_were_judged(tmp_path_factory, keep, done):
    """Whatever is done to the files of a run, in any order: no wrong good, and no good one passed over."""
    folder = WatchedFolder(tmp_path_factory.mktemp("same") / "run", keep)
    damaged = set()
    for what, how, step in done:
        if what == "damage":
            damaged.add(step)
            folder.damage(how, step)
        elif what == "touch":
            folder.touch(how, step)
        elif what == "copy":
            folder.copy()
        elif what == "ask":
            folder.check()
        else:
            cycle(open_run(str(folder.root)), folder.settings)
    folder.check()
    assert folder.bad() <= damaged


@pytest.mark.parametrize("how", DAMAGES)
def test_a_hidden_write_is_bad(tmp_path, how):
    """Its record says so, and the next older one is named."""
    folder = WatchedFolder(tmp_path / "run", "none")
    folder.damage(how, 300)
    assert folder.ask_command() == (200, folder.saved[200])
    assert folder.bad() == {300}


@pytest.mark.parametrize("how", INNOCENT[:-1])
def test_what_changes_no_byte_is_read_once(tmp_path, how):
    """It is no change to anybody else, gets no new verdict, and the next question reads nothing."""
    folder = WatchedFolder(tmp_path / "run", "none")
    for step in STEPS:
        folder.touch(how, step)
    before = sorted(path.name for path in folder.root.glob("_ckptguard/ledger/*/*"))
    assert not best_on_record(open_run(str(folder.root)), ANY).changed
    assert (folder.ask_command(), folder.reads) == ((300, folder.saved[300]), 1)
    assert (folder.ask_command(), folder.ask(), folder.reads) == ((300, folder.saved[300]), (300, folder.saved[300]), 1)
    assert sorted(path.name for path in folder.root.glob("_ckptguard/ledger/*/*")) == before
    assert cycle(open_run(str(folder.root)), folder.settings).checked == ()


@pytest.mark.parametrize("keep", ["none", "link", "copy", "auto"])
def test_what_we_do_ourselves_costs_no_read(tmp_path, keep):
    """Protecting a save changes its ctime, and so does giving its copy bytes of its own, or releasing it."""
    folder = WatchedFolder(tmp_path / "run", keep)
    cycle(open_run(str(folder.root)), folder.settings)
    for step in STEPS:
        assert folder.ask(before_step=step + 1) == (step, folder.saved[step])
    assert folder.reads == 0


def test_a_copied_run_is_read_where_it_answers(tmp_path):
    """One save, once: not all of them."""
    folder = WatchedFolder(tmp_path / "run", "none")
    folder.copy()
    assert (folder.ask_command(), folder.reads) == ((300, folder.saved[300]), 1)
    assert (folder.ask_command(), folder.reads) == ((300, folder.saved[300]), 1)


def test_a_note_of_ctimes_is_no_more_than_a_note(tmp_path):
    """Damaged or gone, it costs a read and says nothing."""
    folder = WatchedFolder(tmp_path / "run", "none")
    folder.touch(change_mode, 300)
    assert folder.ask() == (300, folder.saved[300])
    id = CheckpointId("model-#", 300, 1)
    [noted] = folder.root.glob("_ckptguard/ctimes/*/*.json")
    assert read_ctimes(open_run(str(folder.root)), id) == {
        f"{name_of(300)}/{WEIGHTS}": folder.weights(300).stat().st_ctime_ns
    }
    noted.write_text("{")
    assert folder.ask() == (300, folder.saved[300])
    assert folder.reads == 2
    folder.damage(write, 300)
    assert folder.ask() == (200, folder.saved[200])
