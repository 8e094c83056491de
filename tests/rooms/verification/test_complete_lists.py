"""A list of checksums is complete: what it lists in the checkpoint is there, with these sums, or nothing is good."""

from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path

import pytest
from support.runs import QUICK, save_file, state_dict

import ckptguard
from ckptguard.errors import CkptguardError
from ckptguard.values.verdict import Outcome
from ckptguard.verification.target import verify_target

CASES = 240
LONG_AGO = 1_700_000_000  # in seconds: what was written just now may be unfinished
WEIGHTS = "model.safetensors"
BESIDE = (
    *("config.json", "tokenizer.json", "vocab.txt", "merges.txt", "README.md", "LICENSE", "generation_config.json"),
    *("model.safetensors.index.old", "picture.png", "optimizer.pt.txt", "code/modeling.py", "sub/tokenizer.json"),
    *("sub/deep/notes", "no suffix", "ümläut.txt", ".gitattributes", ".hidden/settings", "__pycache__/a.pyc"),
    "extra.safetensors",
)
STYLES = {
    "gnu": "{digest}  {path}\n",
    "binary": "{digest} *{path}\n",
    "dotted": "{digest}  ./{path}\n",
    "tagged": "{tag} ({path}) = {digest}\n",
    "windows": "{digest}  {path}\r\n",
}
# The name of a list, its algorithm, and the tag of BSD's style.
NAMES = (
    ("SHA256SUMS", "sha256", "SHA256"),
    ("md5sums.txt", "md5", "MD5"),
    ("checksums.txt", "sha1", "SHA1"),
    ("CHECKSUMS.sha512", "sha512", "SHA512"),
)
# What happened to the files since.
HARM = ("nothing", "removed", "several removed", "changed", "all but the weights removed", "a folder removed", "added")


def write(path: Path, seed: int) -> None:
    """A file with content of its own that its suffix promises."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        save_file(state_dict(seed), path)
    elif path.suffix == ".json":
        path.write_text(f'{{"seed": {seed}}}')
    else:
        path.write_text(f"text {seed} of {path.name}")


def harm(model: Path, listed: list[str], kind: str, rng: random.Random) -> None:
    """Do it to some of the listed files."""
    beside = [name for name in listed if name != WEIGHTS]
    if kind == "removed":
        (model / rng.choice(beside)).unlink()
    elif kind == "several removed":
        for name in rng.sample(beside, len(beside) // 2 + 1):
            (model / name).unlink()
    elif kind == "changed":
        with (model / rng.choice(beside)).open("ab") as stream:
            stream.write(b" ")
    elif kind == "all but the weights removed":
        for name in beside:
            (model / name).unlink()
    elif kind == "a folder removed":
        first = rng.choice(beside).split("/")[0]
        for name in beside:
            if name.split("/")[0] == first:
                (model / name).unlink()
    elif kind == "added":
        (model / "later.txt").write_text("later")


@pytest.mark.parametrize("part", range(4))
def test_what_a_list_names_is_there(part, tmp_path):
    """GOOD only if every listed file is there with its sum, as hashlib has it; and GOOD then. `check_pretrained` with
    the same list says the same."""
    against = []
    for number in range(part, CASES, 4):
        rng = random.Random(number)
        model = tmp_path / str(number) / "model"
        listed = [WEIGHTS, *rng.sample(BESIDE, rng.randint(1, 6))]
        for seed, name in enumerate(listed):
            write(model / name, seed)
        file, algorithm, tag = rng.choice(NAMES)
        around = rng.choice(("", "model/"))
        sums = {name: hashlib.new(algorithm, (model / name).read_bytes()).hexdigest() for name in listed}
        line = STYLES[rng.choice(list(STYLES))]
        rng.shuffle(listed)
        text = "".join(line.format(digest=sums[name], path=around + name, tag=tag) for name in listed)
        (model / file).write_bytes(text.encode())
        kind = HARM[number % len(HARM)]
        harm(model, listed, kind, rng)
        for path in (*model.rglob("*"), model):
            os.utime(path, (LONG_AGO, LONG_AGO))

        # Hidden folders are no part of a checkpoint: nothing there is read, but it must be there.
        unread = [name for name in listed if name.startswith((".hidden/", "__pycache__/"))]
        gone = [name for name in listed if not (model / name).is_file()]
        wrong = [
            name
            for name in set(listed) - set(gone) - set(unread)
            if hashlib.new(algorithm, (model / name).read_bytes()).hexdigest() != sums[name]
        ]
        report = verify_target(str(model), QUICK)
        good = report.outcome is Outcome.GOOD
        said = [(f.severity.value, f.file, f.message) for c in report.checkpoints for f in c.findings]
        unsaid = [name for name in (*gone, *wrong) if not any(name == f for _, f, _ in said)]
        expected = Outcome.BAD if gone or wrong else Outcome.GOOD
        alike = bool(unread) or good == _check_pretrained(model, model / file)
        if report.outcome is not expected or unsaid or not alike:
            against.append((number, kind, file, gone, wrong, said))
    assert not against, (len(against), against[0])


def _check_pretrained(model: Path, sums: Path) -> bool:
    try:
        ckptguard.check_pretrained(model, sums=sums)
    except CkptguardError:
        return False
    return True


@pytest.mark.parametrize("name", ["optimizer.pt", WEIGHTS])
def test_a_list_of_files_that_are_all_gone_is_not_kept(name, tmp_path):
    """Also where no listed file is left that would show where the list's paths begin."""
    write(tmp_path / "model" / "other.safetensors", 1)
    (tmp_path / "model" / "SHA256SUMS").write_text(f"{'0' * 64}  {name}\n")
    assert verify_target(str(tmp_path / "model"), QUICK).outcome is Outcome.BAD


def test_a_list_of_other_things_says_nothing(tmp_path):
    """A list of the pictures of a data set is not about the model beside it."""
    write(tmp_path / "model" / WEIGHTS, 1)
    lines = "".join(f"{'0' * 64}  train/{n:04d}.jpg\n" for n in range(9))
    (tmp_path / "model" / "checksums.txt").write_text(lines)
    assert verify_target(str(tmp_path / "model"), QUICK).outcome is Outcome.GOOD


def test_a_listed_link_is_there(tmp_path):
    """It is not followed, so its sum is not compared, and the verdict says so."""
    write(tmp_path / "model" / WEIGHTS, 1)
    (tmp_path / "outside.txt").write_text("text")
    os.symlink(tmp_path / "outside.txt", tmp_path / "model" / "notes.txt")
    sums = "".join(
        f"{hashlib.sha256((tmp_path / 'model' / name).read_bytes()).hexdigest()}  {name}\n"
        for name in (WEIGHTS, "notes.txt")
    )
    (tmp_path / "model" / "SHA256SUMS").write_text(sums)
    report = verify_target(str(tmp_path / "model"), QUICK)
    assert report.outcome is Outcome.GOOD
    messages = [f.message for c in report.checkpoints for f in c.findings if f.file == "notes.txt"]
    assert "SHA256SUMS lists it, but it is not a file that is read here: its sum was not compared" in messages
