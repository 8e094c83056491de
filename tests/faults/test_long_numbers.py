"""Numbers of thousands of digits, wherever a file states one: Python's own parser refuses them in words of its own, and
so does its printing. Nobody is shown those words, and no reader ends in them."""

from __future__ import annotations

import io
import json
import pickle
import random
import re
import struct
import tarfile
import zipfile

import pytest
from click.testing import CliRunner
from support.judged_files import findings_of
from support.tiny_files import WEIGHTS, content

from ckptguard.cli.entry import commands
from ckptguard.errors import StateError
from ckptguard.training.content.tagged_json import from_text

NUMBER = re.compile(rb"\d+")
LENGTHS = (18, 19, 20, 300, 640, 1000, 1001, 4299, 4300, 4301, 9999)


def framed(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text + bytes(72)


def array(text: bytes) -> bytes:
    return b"\x93NUMPY\x02\x00" + struct.pack("<I", len(text)) + text + bytes(48)


def plain(text: bytes) -> bytes:
    return text


def archived(text: bytes) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as file:
        file.writestr("a.npy", array(text))
    return made.getvalue()


def noted(text: bytes) -> bytes:
    """A tar whose extended header is this text."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as file:
        head = tarfile.TarInfo("x")
        head.type, head.size = tarfile.XHDTYPE, len(text)
        file.addfile(head, io.BytesIO(text))
        file.addfile(tarfile.TarInfo("a.bin"))
    return made.getvalue()


HEADER = content(1)[WEIGHTS][8 : 8 + int.from_bytes(content(1)[WEIGHTS][:8], "little")]
NPY = b"{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }\n"
STRUCTURED = b"{'descr': [('a', '<f4', (2,)), ('b', '|S3')], 'fortran_order': False, 'shape': (3, 4), }\n"
INDEX = {"metadata": {"total_size": 72}, "weight_map": {"a": WEIGHTS, "b": WEIGHTS, "c": WEIGHTS}}
FILES = {
    "a safetensors header": (WEIGHTS, HEADER, framed),
    "an index": ("model.safetensors.index.json", json.dumps(INDEX).encode(), plain),
    "a config": ("config.json", b'{"hidden_size": 4, "layers": [1, 2, -0, {"n": 3}]}', plain),
    "counters": (
        "trainer_state.json",
        b'{"global_step": 10, "epoch": 1, "log_history": [{"step": 5, "loss": 1}]}',
        plain,
    ),
    "an array": ("a.npy", NPY, array),
    "an array of fields": ("a.npy", STRUCTURED, array),
    "an archive of arrays": ("a.npz", NPY, archived),
    "lines of YAML": ("meta.yaml", b"step: 10\nepoch: 2\n", plain),
    "a pickle of text": ("net.pkl", pickle.dumps({"a": 3, "b": [4, 5]}, 0), plain),
    "a tracker": ("latest_checkpointed_iteration.txt", b"100", plain),
    "a pointer": ("latest", b"global_step 100", plain),
    "an extended header": ("a.tar", b"13 size=1234\n", noted),
}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", FILES)
def test_no_file_is_judged_in_the_words_of_python_s_parser(name, length, tmp_path):
    """Each number of each file, by itself and all at once."""
    path, text, made = FILES[name]
    places = [match.span() for match in NUMBER.finditer(text)]
    assert places
    chance = random.Random(length)
    for changed in [*([one] for one in places[:8]), places]:
        hostile, behind = b"", 0
        for begin, end in changed:
            digits = b"1" + b"".join(b"%d" % chance.randint(0, 9) for _ in range(length - 1))
            hostile, behind = hostile + text[behind:begin] + digits, end
        files = {path: made(hostile + text[behind:])}
        if path != WEIGHTS:
            files |= {WEIGHTS: content(1)[WEIGHTS]}
        said = " ".join(str(finding) for finding in findings_of(tmp_path, files))
        assert "Exceeds the limit" not in said
        assert "digits" not in said or "too many digits" in said
        assert "ValueError" not in said


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("command", ["show", "clear", "diff", "known-good --before-step", "restore --step", "pin"])
def test_a_word_of_a_user_may_have_any_length(command, length, tmp_path):
    """It names nothing that there is."""
    (tmp_path / "net-1.safetensors").write_bytes(content(1)[WEIGHTS])
    name, *option = command.split()
    said = CliRunner().invoke(commands, [name, str(tmp_path), *option, "9" * length], prog_name="ckptguard")
    assert said.exit_code not in (0, 1), said.output
    assert not isinstance(said.exception, ValueError)
    assert "Exceeds the limit" not in said.output


@pytest.mark.parametrize("length", LENGTHS)
def test_a_saved_state_with_long_numbers(length):
    """It is read, or refused in our words."""
    text = b'{"step": 1' + b"0" * length + b"}"
    if length < 4300:
        assert from_text(text)["step"] == 10**length
        return
    with pytest.raises(StateError, match="too many digits"):
        from_text(text)
