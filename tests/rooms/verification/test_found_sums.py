"""Checksum files that lie beside what is verified are used by themselves, and nothing that they say is lost."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.faults import flip
from support.runs import QUICK, save_file, state_dict, write_sharded, write_torch
from support.views import look

from ckptguard.checks.digests import UNSEEN_FLIPS
from ckptguard.formats.table import is_sum_list
from ckptguard.keep.copies import keep_checkpoint
from ckptguard.records.run import open_run
from ckptguard.runs.results import VerifyReport
from ckptguard.runs.work import Work
from ckptguard.scan import scan_files
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.verdict import Outcome, Severity
from ckptguard.verification.checksum_files import LONGEST
from ckptguard.verification.target import Selection, verify_target

FIRST, SECOND, THIRD = (f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3))


def digest(path: Path, algorithm: str = "sha256") -> str:
    """The digest of a file, by hashlib."""
    return hashlib.new(algorithm, path.read_bytes()).hexdigest()


def said(report: VerifyReport, *severities: Severity) -> list[str]:
    """What findings of these severities say, with their files."""
    found = [f for c in report.checkpoints for f in c.findings if f.severity in severities]
    return [f"{f.file}: {f.message}" for f in found]


def errors(report: VerifyReport) -> list[str]:
    """What makes it bad."""
    return said(report, Severity.ERROR)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A sharded model in a folder of its own."""
    return tmp_path / write_sharded(tmp_path, 1, seed=1)


def write_sums(folder: Path, *names: str, file: str = "SHA256SUMS", algorithm: str = "sha256") -> Path:
    """A list of these files, or of all."""
    listed = names or sorted(p.name for p in folder.iterdir())
    sums = folder / file
    sums.write_text("".join(f"{digest(folder / name, algorithm)}  {name}\n" for name in listed))
    return sums


@pytest.mark.parametrize(
    ("file", "algorithm"),
    [
        ("SHA256SUMS", "sha256"),
        ("SHA512SUMS.txt", "sha512"),
        ("sha256sum.txt", "sha256"),
        ("MD5SUMS", "md5"),
        ("md5.txt", "md5"),
        ("checksums.txt", "sha1"),
        ("checksum", "sha224"),
        ("CHECKSUMS.sha384", "sha384"),
        ("model-1.0-SHA256SUMS", "sha256"),
        ("all.md5", "md5"),
        ("checklist.chk", "md5"),
    ],
)
def test_a_list_is_found_by_its_name(model, file, algorithm):
    """It vouches, by name, and a flipped bit is BAD."""
    write_sums(model, file=file, algorithm=algorithm)
    report = verify_target(str(model), QUICK)
    assert report.outcome is Outcome.GOOD
    assert f"None: {file} vouches for {4 + (model / 'config.json').exists()} files ({algorithm})" in said(
        report, Severity.NOTICE
    )
    flip(model / SECOND, -1000)
    report = verify_target(str(model), QUICK)
    assert report.outcome is Outcome.BAD
    assert errors(report) == [f"{SECOND}: {algorithm} is not the one that {file} states"]


@pytest.mark.parametrize(
    "name",
    [
        "SHA256SUMS.asc",
        "SHA256SUMS.sig",
        "model_md5.safetensors",
        "efficientnet-b3",
        "README.md",
        "sums.json",
        "md5.py",
    ],
)
def test_other_names_are_no_lists(name):
    """Signatures, models and prose are not."""
    assert not is_sum_list(name)


def test_the_sum_of_one_file_lies_beside_it(tmp_path):
    """With its name, with another folder's, or alone; one of another file says nothing."""
    path, other = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    for place in (path, other):
        save_file(state_dict(1), place)
    sidecar = tmp_path / "a.safetensors.sha256"
    for text in (digest(path), f"{digest(path)}  a.safetensors\n", f"{digest(path)} */build/out/a.safetensors\n"):
        sidecar.write_text(text)
        report = verify_target(str(path), QUICK)
        assert said(report, Severity.NOTICE) == ["None: a.safetensors.sha256 vouches for it (sha256)"]
    alone = verify_target(str(other), QUICK)
    assert (alone.outcome, said(alone, Severity.WARNING)) == (Outcome.GOOD, [])
    flip(path, -1000)
    assert verify_target(str(path), QUICK).outcome is Outcome.BAD


def test_what_a_list_does_not_name_is_said(model):
    """A file of a folder, and a lone file beside a list of others."""
    write_sums(model, FIRST, "model.safetensors.index.json")
    report = verify_target(str(model), QUICK)
    assert report.outcome is Outcome.GOOD
    assert said(report, Severity.WARNING) == [f"{name}: SHA256SUMS does not name it" for name in (SECOND, THIRD)]
    assert any(UNSEEN_FLIPS in one for one in said(report, Severity.NOTICE))
    lone = verify_target(str(model / THIRD), QUICK)
    assert said(lone, Severity.WARNING) == [f"{THIRD}: SHA256SUMS does not name it"]


def test_without_any_the_limit_is_said(model, tmp_path):
    """A flipped bit cannot be seen; in an archive with checksums of its own it can."""
    (told,) = [one for one in said(verify_target(str(model), QUICK), Severity.NOTICE) if UNSEEN_FLIPS in one]
    assert "this and 2 more files" in told
    (tmp_path / "other").mkdir()
    path = tmp_path / "other" / write_torch(tmp_path / "other", 1, seed=1)
    assert not any(UNSEEN_FLIPS in one for one in said(verify_target(str(path), QUICK), Severity.NOTICE))


def test_what_a_list_names_and_is_gone(model):
    """It makes it BAD: a shard, and what no model needs."""
    (model / "config.json").write_text("{}")
    write_sums(model)
    (model / "config.json").unlink()
    assert errors(verify_target(str(model), QUICK)) == ["config.json: SHA256SUMS lists it, but it is not there"]
    (model / THIRD).unlink()
    assert f"{THIRD}: SHA256SUMS lists it, but it is not there" in errors(verify_target(str(model), QUICK))


def test_several_lists_are_all_compared(model):
    """One that is right does not make up for one that is wrong."""
    write_sums(model)
    sums = write_sums(model, FIRST, file="MD5SUMS", algorithm="md5")
    assert verify_target(str(model), QUICK).outcome is Outcome.GOOD
    sums.write_text(f"{'0' * 32}  {FIRST}\n")
    assert errors(verify_target(str(model), QUICK)) == [f"{FIRST}: md5 is not the one that MD5SUMS states"]


def test_lists_in_inner_folders_speak_of_those(tmp_path):
    """Not of files of the same name around them."""
    inner = tmp_path / write_sharded(tmp_path, 1, seed=1) / "extra"
    inner.mkdir()
    save_file(state_dict(2), inner / FIRST)
    (inner / "SHA256SUMS").write_text(f"{'0' * 64}  {FIRST}\n")
    report = verify_target(str(tmp_path), QUICK)
    wrong = [one for one in errors(report) if "sha256" in one]
    assert len(wrong) == 1
    assert f"extra/{FIRST}: sha256 is not the one that" in wrong[0]


def as_link(sums: Path) -> None:
    """It leads out of the folder."""
    outside = sums.parent.parent / "outside"
    sums.rename(outside)
    sums.symlink_to(outside)


def as_pipe(sums: Path) -> None:
    """Whoever opens it would wait."""
    sums.unlink()
    os.mkfifo(sums)


def as_giant(sums: Path) -> None:
    """More than anybody would parse."""
    os.truncate(sums, LONGEST + 1)


def as_contradiction(sums: Path) -> None:
    """Two sums of one file, one of which is right."""
    sums.write_text(f"{sums.read_text()}{'0' * 64}  {FIRST}\n")


def as_two_paths(sums: Path) -> None:
    """The same, by another way to it."""
    sums.write_text(f"{sums.read_text()}{'0' * 64}  x/../{FIRST}\n")


def as_noise(sums: Path) -> None:
    """No text at all."""
    sums.write_bytes(b"\xc3\x28" + os.urandom(64))


HOSTILE = (as_link, as_pipe, as_giant, as_contradiction, as_two_paths, as_noise)


@pytest.mark.parametrize("make", HOSTILE, ids=lambda make: make.__name__)
@pytest.mark.parametrize("in_run", [False, True])
@pytest.mark.timeout(60)
def test_a_list_that_cannot_be_used_leaves_the_question_open(tmp_path, model, make, in_run):
    """Neither good nor bad, in one sentence that names it; by naming the right one there is a way out."""
    make(write_sums(model))
    if in_run:
        open_run(str(tmp_path))
        (tmp_path / write_sharded(tmp_path, 2, seed=2)).rename(tmp_path / "other-2")
    report = verify_target(str(tmp_path if in_run else model), QUICK)
    (found,) = [c for c in report.checkpoints if c.path.endswith(model.name)]
    assert (found.outcome, report.could_not_tell) == (Outcome.PENDING, True)
    (finding,) = found.findings
    assert finding.message.startswith("the checksum file")
    assert "SHA256SUMS" in finding.message
    assert "\n" not in finding.message
    right = tmp_path / "RIGHT"
    right.write_text(f"{digest(model / FIRST)}  {FIRST}\n")
    assert verify_target(str(model), QUICK, Selection(check_sums=str(right))).outcome is Outcome.GOOD


@pytest.mark.parametrize("text", ["", "\0" * 500, "<html>404</html>\n", "version https://git-lfs.github.com/spec/v1\n"])
def test_a_list_that_says_nothing_is_a_warning(model, text):
    """It vouches for nothing, and both are said."""
    (model / "SHA256SUMS").write_text(text)
    report = verify_target(str(model), QUICK)
    assert report.outcome is Outcome.GOOD
    assert said(report, Severity.WARNING) == ["SHA256SUMS: SHA256SUMS states no checksums that are known here"]
    assert any(UNSEEN_FLIPS in one for one in said(report, Severity.NOTICE))


def test_a_signed_list_is_used_and_its_other_lines_are_told(model):
    """Lines that are in no style are counted; a line that lost a digit does not vouch."""
    sums = write_sums(model, FIRST, SECOND)
    lines = sums.read_text().splitlines()
    sums.write_text("\n".join(["-----BEGIN PGP SIGNED MESSAGE-----", lines[0], lines[1][1:], "-----END-----"]))
    warnings = said(verify_target(str(model), QUICK), Severity.WARNING)
    assert "3 lines of SHA256SUMS not understood, first line 1" in warnings[0]
    assert f"{SECOND}: SHA256SUMS does not name it" in warnings


def test_paths_that_lead_out_are_nobodys(model, tmp_path):
    """Absolute ones, and those with `..`: nothing there is opened, and nothing is held against the checkpoint."""
    outside = tmp_path / "outside.safetensors"
    os.mkfifo(outside)
    zero = "0" * 64
    sums = write_sums(model)
    sums.write_text(f"{sums.read_text()}{zero}  ../outside.safetensors\n{zero}  {outside}\n{zero}  /etc/passwd\n")
    report = verify_target(str(model), QUICK)
    assert (report.outcome, said(report, Severity.WARNING)) == (Outcome.GOOD, [])


def test_a_list_costs_no_second_read(model):
    """Its digests are taken in the one pass."""
    write_sums(model, algorithm="sha512", file="SHA512SUMS")
    asked = []

    def scanner(storage, keys, options, progress):
        asked.append(options)
        return scan_files(storage, keys, options, progress)

    assert verify_target(str(model), QUICK, work=Work(scanner=scanner)).outcome is Outcome.GOOD
    assert [options.sums for options in asked if not options.structure_only] == [("sha512",)]


@pytest.mark.parametrize("beside", [False, True])
def test_a_runs_own_lists_obey_the_same_law(tmp_path, beside):
    """In a checkpoint's folder, and beside checkpoints of one file: good with them, and BAD against them."""
    names = []
    for step in (1, 2):
        if beside:
            names.append(f"net-{step}.safetensors")
            save_file(state_dict(step), tmp_path / names[-1])
        else:
            names.append(f"{write_sharded(tmp_path, step, seed=step)}/{SECOND}")
    for name in names:
        write_sums((tmp_path / name).parent, *[n for n in names if beside] or [SECOND])
    flip(tmp_path / names[1], -1000)
    report = verify_target(str(tmp_path), QUICK)
    assert [c.outcome for c in report.checkpoints] == [Outcome.GOOD, Outcome.BAD]
    told = f"{names[1]}: sha256 is not the one that SHA256SUMS states"
    assert errors(report) == [told]


def test_a_kept_copy_obeys_it_too(tmp_path):
    """A save that is gone is judged by its copy, and by the list that was saved with it."""
    write_sharded(tmp_path, 0, seed=5)
    assert verify_target(str(tmp_path), QUICK).outcome is Outcome.GOOD
    run = open_run(str(tmp_path))
    path = tmp_path / write_sharded(tmp_path, 1, seed=1)
    flip(path / THIRD, -1000)
    data = bytearray((path / THIRD).read_bytes())
    data[-1000] ^= 1
    (path / "SHA256SUMS").write_text(f"{hashlib.sha256(bytes(data)).hexdigest()}  {THIRD}\n")
    checkpoint = look(run).checkpoint(path.name)
    keep_checkpoint(look(run), checkpoint, look(run).new_id(checkpoint))
    subprocess.run(["rm", "-r", str(path)], check=True)
    (judged,) = reconcile(look(run), PassNotes()).checked
    assert judged.outcome is Outcome.BAD


def test_a_list_of_the_save_before_is_none_of_the_new_one(tmp_path):
    """It is older than what was saved over its file: that says nothing, until the new one is written."""
    path, sidecar = tmp_path / "last.pt", tmp_path / "last.pt.sha256"

    def save(seed: int) -> None:
        write_torch(tmp_path, seed, seed=seed)
        (tmp_path / f"net-{seed}.pt").replace(path)

    save(1)
    sidecar.write_text(digest(path))
    assert verify_target(str(tmp_path), QUICK).outcome is Outcome.GOOD
    save(2)
    os.utime(sidecar, ns=(1, path.stat().st_mtime_ns - 10**9))
    report = verify_target(str(tmp_path), QUICK)
    assert (report.outcome, report.could_not_tell) == (Outcome.PENDING, True)
    assert "last.pt.sha256 is older" in report.checkpoints[0].findings[0].message
    sidecar.write_text(digest(path))
    assert verify_target(str(tmp_path), QUICK).outcome is Outcome.GOOD


@pytest.mark.parametrize("tag", ["sha256", "git"])
def test_what_the_hub_said_at_the_download_counts(model, tag):
    """`hf download --local-dir` keeps it; a file that was written since is a question."""
    path = model / FIRST
    known = digest(path) if tag == "sha256" else digest_of_git(path)
    (record := model / ".cache/huggingface/download" / f"{FIRST}.metadata").parent.mkdir(parents=True)
    record.write_text(f"{'c' * 40}\n{known}\n{path.stat().st_mtime + 5}\n")
    told = said(verify_target(str(model), QUICK), Severity.NOTICE)
    assert any(one.startswith(f"None: the hub's record of the download vouches for {FIRST}") for one in told)
    flip(path, -1000)
    assert verify_target(str(model), QUICK).outcome is Outcome.BAD
    for when in (path.stat().st_mtime - 100, "nan", "inf", "-inf", ""):  # the others are no time
        record.write_text(f"{'c' * 40}\n{known}\n{when}\n")
        assert verify_target(str(model), QUICK).outcome is Outcome.SUSPECT
    record.write_text("x")
    assert verify_target(str(model), QUICK).outcome is Outcome.GOOD


def digest_of_git(path: Path) -> str:
    """The name that git gives a file."""
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


LINE = st.sampled_from(["right", "wrong", "other algorithm", "noise", "outside", "absent", "upper", "again"])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(LINE, max_size=6), file=st.sampled_from(["SHA256SUMS", "a.safetensors.sha256", "checksums.txt"]))
def test_whatever_a_list_holds_the_outcome_follows(tmp_path_factory, lines, file):
    """Against a model of it: a wrong sum is never good, a contradiction is never either, and what was not used is
    said."""
    folder = tmp_path_factory.mktemp("any")
    path = folder / "a.safetensors"
    save_file({"w": state_dict(1)["embed.weight"]}, path)
    right, zero = digest(path), "0" * 64
    texts = {
        "right": f"{right}  a.safetensors",
        "wrong": f"{zero}  a.safetensors",
        "other algorithm": f"{digest(path, 'sha512')}  a.safetensors" if file != "checksums.txt" else "# none",
        "noise": "hello there",
        "outside": f"{zero}  ../a.safetensors\n{zero}  /a.safetensors",
        "absent": f"{zero}  gone.txt",
        "upper": f"SHA256 (./a.safetensors) = {right.upper()}",
        "again": f"{right} *a.safetensors",
    }
    (folder / file).write_text("".join(f"{texts[line]}\n" for line in lines))
    report = verify_target(str(path), QUICK)
    sums = {"right", "upper", "again"} & set(lines)
    if "wrong" in lines and sums:
        assert report.outcome is Outcome.PENDING
    elif "wrong" in lines and "other algorithm" not in lines:
        assert report.outcome is Outcome.BAD
    elif "wrong" not in lines:
        assert report.outcome is Outcome.GOOD
        vouched = any("vouches for it" in one for one in said(report, Severity.NOTICE))
        assert vouched or any(UNSEEN_FLIPS in one for one in said(report, Severity.NOTICE))
        assert ("noise" in lines) <= bool(said(report, Severity.WARNING))
