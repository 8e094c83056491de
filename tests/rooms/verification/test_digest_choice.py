"""``--digest blake3``: MD5 is taken once, kept, and left out of later passes, which say so."""

import hashlib
import json
import os

import pytest
from click.testing import CliRunner
from support.faults import flip
from support.runs import QUICK, write_torch
from support.views import look

from ckptguard.cli.entry import commands
from ckptguard.inspect.sums import sums
from ckptguard.layouts import Checkpoint
from ckptguard.records.after_seal import read_late_md5s
from ckptguard.records.run import Run
from ckptguard.runs.work import Work
from ckptguard.scan import Scan, ScanOptions, files, scan_files
from ckptguard.upkeep.finish_copies import protect_finished, waiting_alone
from ckptguard.values.ids import CheckpointId
from ckptguard.values.verdict import Outcome
from ckptguard.verification import checkpoint as checkpoint_module
from ckptguard.verification.checkpoint import verify_checkpoint, verify_kept

BLAKE3 = QUICK.changed(digest="blake3")


class Watched:
    """A scanner that remembers for what it was asked."""

    def __init__(self) -> None:
        self.md5: list[bool] = []

    def __call__(self, storage, keys, options=None, progress=None) -> Scan:
        self.md5.append((options or ScanOptions()).md5)
        return scan_files(storage, keys, options, progress)


@pytest.fixture
def scanner() -> Watched:
    """Remembers."""
    return Watched()


def there(run: Run, path: str = "net-100.pt") -> Checkpoint:
    """The checkpoint as it lies there now."""
    found = look(run).checkpoint(path)
    assert found is not None
    return found


def manifests(root) -> dict[str, list[str | None]]:
    """The MD5s on record, by manifest."""
    found = sorted((root / "_ckptguard" / "manifests").rglob("*.json"))
    return {p.name: [f.get("md5") for f in json.loads(p.read_text().partition("\n")[0])["files"]] for p in found}


def digests(root) -> list[list[str]]:
    """What each verdict says that it computed."""
    found = sorted((root / "_ckptguard" / "ledger").rglob("*.json"))
    return [json.loads(p.read_text().partition("\n")[0])["digests"] for p in found]


def test_md5_is_taken_once(root, run, scanner):
    """The first verification takes it whatever is set; later ones leave it out and keep what is on record."""
    write_torch(root, 100, seed=1)
    for _ in range(2):
        assert verify_checkpoint(look(run, BLAKE3), there(run), work=Work(scanner=scanner)).outcome is Outcome.GOOD
    assert scanner.md5 == [True, False]
    verify_checkpoint(look(run), there(run), work=Work(scanner=scanner))
    assert scanner.md5[-1] is True
    (recorded,) = manifests(root).values()
    assert all(recorded)
    assert digests(root) == [["blake3", "md5"]]


@pytest.mark.parametrize(
    ("digest", "yield_for", "large", "expected"),
    [
        ("auto", 10.0, True, False),
        ("auto", 0.0, True, False),
        ("auto", None, True, True),
        ("auto", 10.0, False, True),
        ("md5", 10.0, True, True),
        ("blake3", 10.0, True, False),
    ],
)
@pytest.mark.parametrize("kept", [False, True], ids=["in place", "kept"])
def test_md5_of_large_ones_is_not_taken_beside_training(
    root, run, scanner, monkeypatch, digest, yield_for, large, expected, kept
):
    """Only in a first verdict with patience, and unless the setting asks for it. The manifest then has none, the
    verdict says so, and `sums` computes it."""
    monkeypatch.setattr(checkpoint_module, "LARGE", 0 if large else 1 << 30)
    path = root / write_torch(root, 100, seed=1)
    settings, work = QUICK.changed(digest=digest, keep="link"), Work(scanner=scanner, yield_for=yield_for)
    if kept:
        assert protect_finished(look(run, settings)) == []
        path.unlink()
        [copy] = waiting_alone(look(run, settings))
        assert verify_kept(look(run, settings), copy, work=work).outcome is Outcome.GOOD
    else:
        assert verify_checkpoint(look(run, settings), there(run), work=work).outcome is Outcome.GOOD
        assert sums(str(path), settings).files[0].md5 == hashlib.md5(path.read_bytes()).hexdigest()
    assert scanner.md5 == [expected]
    (recorded,) = manifests(root).values()
    assert [md5 is not None for md5 in recorded] == [expected]
    assert digests(root) == [["blake3", "md5"] if expected else ["blake3"]]


@pytest.mark.parametrize("damaged", [False, True])
def test_what_has_no_md5_gets_it_in_a_later_reading(root, run, scanner, monkeypatch, damaged):
    """Only if BLAKE3 is as sealed in the same reading. Then nobody computes it again."""
    monkeypatch.setattr(checkpoint_module, "LARGE", 0)
    path = root / write_torch(root, 100, seed=1)
    expected = hashlib.md5(path.read_bytes()).hexdigest()
    verify_checkpoint(look(run), there(run), work=Work(scanner=scanner, yield_for=0.0))
    if damaged:
        flip(path)
    verify_checkpoint(look(run), there(run), work=Work(scanner=scanner))
    assert scanner.md5 == [False, True]
    recorded = read_late_md5s(run, CheckpointId("net-#.pt", 100, 1))
    assert recorded == ({} if damaged else {"net-100.pt": expected})
    if not damaged:
        verify_checkpoint(look(run, BLAKE3), there(run), work=Work(scanner=scanner))
        assert scanner.md5[2:] == [False]
        flip(path)
        assert sums(str(path), QUICK).files[0].md5 == expected


def test_damage_is_found_by_blake3_alone_and_the_verdict_says_so(root, run, scanner):
    """A flipped bit with equal size, time and inode; MD5 is on record and not taken again."""
    path = root / "net-100.pt"
    write_torch(root, 100, seed=1)
    verify_checkpoint(look(run, BLAKE3), there(run))
    info = path.stat()
    with path.open("r+b") as file:
        file.seek(info.st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert verify_checkpoint(look(run, BLAKE3), there(run), work=Work(scanner=scanner)).outcome is Outcome.BAD
    assert scanner.md5 == [False]
    assert digests(root) == [["blake3", "md5"], ["blake3"]]


def test_a_save_of_its_own_gets_its_own_md5(root, run, scanner):
    """A checkpoint that was saved again is a new generation, with its MD5 on record too."""
    write_torch(root, 100, seed=1)
    verify_checkpoint(look(run, BLAKE3), there(run))
    (root / "net-100.pt").unlink()
    write_torch(root, 100, seed=2)
    assert str(verify_checkpoint(look(run, BLAKE3), there(run), work=Work(scanner=scanner)).id) == "100.2"
    assert scanner.md5 == [True]
    assert [all(md5s) for md5s in manifests(root).values()] == [True, True]


def test_a_stray_file_keeps_nothing(tmp_path, monkeypatch):
    """Nothing records a stray file's MD5, so it is left out, unless a checksum file states one."""
    write_torch(tmp_path, 100, seed=1)
    monkeypatch.setenv("CKPTGUARD_SETTLE", "0")
    monkeypatch.chdir(tmp_path)
    path, asked = str(tmp_path / "net-100.pt"), []

    def watched(storage, keys, options=None, progress=None):
        asked.append((options.md5, options.workers))
        return real(storage, keys, options, progress)

    real = files.scan_files
    monkeypatch.setattr(files, "scan_files", watched)
    done = CliRunner().invoke(commands, ["verify", path, "--digest", "blake3", "--workers", "3"])
    assert done.exit_code == 0, done.output
    sums = tmp_path / "MD5SUMS"
    sums.write_text(f"{hashlib.md5((tmp_path / 'net-100.pt').read_bytes()).hexdigest()}  net-100.pt\n")
    done = CliRunner().invoke(commands, ["verify", path, "--digest", "blake3", "--check-sums", str(sums)])
    assert done.exit_code == 0, done.output
    assert asked == [(False, 3), (True, 0)]
