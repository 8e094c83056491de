"""Checkpoints of any name that a file system takes: every door says what it says of a plain one, on as many lines."""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.runs import save_file

from ckptguard.values.ids import escape

ODD = (
    "a\nb",
    "\n",
    "a\r\nb",
    "a\\nb",
    "a\tb",
    "\x1b[2J",
    "\u202ecod",
    "a b'\"",
    "..",
    "a://b".replace("/", "\\"),
    "é",
    "[x]",
    "%0A",
)
names = st.one_of(
    st.sampled_from(ODD),
    st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=20),
)


def write(path, seed=1):
    """A healthy file of the format that its name states."""
    state = {"w": torch.arange(1.0, 40.0) / seed, "b": torch.ones(3) / 7 / seed}
    if path.suffix == ".pt":
        torch.save(state, path)
    elif path.suffix == ".npz":
        with path.open("wb") as file:  # numpy would add to some names
            np.savez(file, **{name: tensor.numpy() for name, tensor in state.items()})
    else:
        save_file(state, path)


def said(invoke, root):
    """What each command says of the run: its exit code and how many lines, and its document."""
    found = {}
    for words in (("verify",), ("list",), ("status",), ("incidents",), ("scrub",), ("prune", "--dry-run")):
        done = invoke(words[0], root, *words[1:], *(("--keep-last", "1") if words[0] == "prune" else ()))
        assert "unexpected" not in done.stderr
        found[words[0]] = (done.exit_code, done.stdout.count("\n"), done.stderr.count("\n"))
    return found


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(names, st.sampled_from([".pt", ".safetensors", ".npz"]))
def test_every_door_says_of_an_odd_name_what_it_says_of_a_plain_one(root, invoke, name, suffix):
    """The archive of a torch file repeats the stem of its name; that is no reason to call it bad."""
    name = "".join(c for c in name if not c.isdigit())  # a number would order it
    found = []
    for stem in ("plain", name):
        shutil.rmtree(root)
        root.mkdir()
        for step in (1, 2):
            write(root / f"step_{step}{stem}{suffix}", seed=step)
        found.append(said(invoke, root))
    assert found[0] == found[1]
    path = f"{root}/step_2{name}{suffix}"
    assert json.loads(invoke("known-good", root, "--json").stdout)["path"] == path
    done = invoke("known-good", root)
    assert (done.exit_code, done.stdout) == ((0, f"{path}\n") if escape(path) == path else (1, ""))


@pytest.mark.parametrize(
    "stem", ["a\nb", "..", "a\\b", "data", "data.pkl", "byteorder", "archive", ".data", "C:", "http:"]
)
def test_a_torch_file_may_repeat_any_stem(root, document, stem):
    """It loads, so it is good, under the name that it was written by and under any other."""
    path = root / f"{stem}.pt"
    write(path)
    assert torch.load(path, weights_only=True)["b"].shape == (3,)
    assert document("verify", path)[1]["outcome"] == "good"
    assert document("verify", path.rename(root / "other.pt"))[1]["outcome"] == "good"


@pytest.mark.parametrize("name", [b"net-\xff.pt", b"net-\xff-100"])
def test_a_name_that_is_no_unicode_is_told(root, invoke, document, name):
    """It is neither good nor bad, and nobody takes the run for complete. Other files may have such names."""
    write(root / "net-100.pt")
    place = os.path.join(os.fsencode(root), name)
    if name.endswith(b".pt"):
        shutil.copy(root / "net-100.pt", place)
    else:
        os.mkdir(place)
    sentence = f"{escape(os.fsdecode(name))} was not looked at: its name is not valid Unicode; rename it"
    for command, code in (("verify", 1), ("list", 0), ("status", 0)):
        done = invoke(command, root)
        assert (done.exit_code, done.stderr.count(sentence)) == (code, 1)
    (root / "net-100.pt").unlink()
    shutil.rmtree(root / "_ckptguard")
    done = invoke("gate", root)
    assert (done.exit_code, done.stdout) == (1, "")
    assert sentence in done.stderr


def test_a_named_checkpoint_with_such_a_name_is_could_not_tell(root, invoke, tmp_path):
    """The file itself, and the folder that holds nothing else."""
    folder = os.fsencode(tmp_path / "model")
    os.mkdir(folder)
    write(root / "net-100.pt")
    os.replace(root / "net-100.pt", os.path.join(folder, b"a\xff.pt"))
    for target in (tmp_path / "model", os.fsdecode(os.path.join(folder, b"a\xff.pt"))):
        done = invoke("verify", target)
        assert done.exit_code == 1
        assert "cannot be read: its name is not valid Unicode; rename it" in done.stdout + done.stderr


def test_a_note_with_such_a_name_harms_nothing(root, invoke):
    """No model needs it."""
    write(root / "net-100.pt")
    with open(os.path.join(os.fsencode(root), b"notes-\xff.txt"), "wb") as file:
        file.write(b"x")
    assert invoke("verify", root).exit_code == 0
