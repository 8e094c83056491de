"""However supervise ends, what a plain resume would take is good, or the last line says that it is not."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import re
import struct
from pathlib import Path

import pytest
from supervised_training import until

# Which names the trainer writes, what its last save is, how it ends, how often it may start again, and whether every
# start goes the same way.
NAMES = ("numbered", "fixed", "in place", "both")
LAST = ("good", "nan", "torn", "none")
ENDS = ("0", "7", "kill", "stopped", "asked")
EVERY = tuple(itertools.product(NAMES, LAST, ENDS, (0, 1, 2), (True, False)))
SAMPLE = 24

TRAINER = """
names, last, end, again = {case!r}

def content(step, nan=False):
    values = weights(step, nan=nan).tobytes()
    places = {{"model.w": {{"dtype": "F32", "shape": [8, 8], "data_offsets": [0, len(values)]}}}}
    header = json.dumps(places).encode()
    return len(header).to_bytes(8, "little") + header + values

def put(name, data):
    if names == "in place":
        with open(run / name, "wb") as file:
            file.write(data)
    else:
        (run / f".tmp-{{name}}").write_bytes(data)
        (run / f".tmp-{{name}}").rename(run / name)

def write(step, data):
    if names in ("numbered", "both"):
        put(f"net-{{step}}.safetensors", data)
    if names != "numbered":
        put("last.safetensors", data)

run.mkdir(exist_ok=True)
number = start(run)
first = 10 * number
for step in range(first, first + 3):
    before = len(list(run.glob("_ckptguard/ledger/*/*.good.json")))
    write(step, content(step))
    until(lambda: len(list(run.glob("_ckptguard/ledger/*/*.good.json"))) > before, "a verdict")
if number == 1 or again:
    if last == "torn":
        write(first + 3, content(first + 3)[:-40])
    elif last != "none":
        write(first + 3, content(first + 3, nan=last == "nan"))
    note(run, "ready")
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    while end in ("stopped", "asked") and (last == "nan" or end == "asked"):
        signal.pause()
    sys.exit(int(end) if end.isdigit() else 0)
"""


def is_good(path: Path) -> bool:
    """Whether a file is whole, and every number in it is finite: read without anything of ours."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    try:
        places = [place["data_offsets"] for place in json.loads(data[8 : 8 + length]).values()]
    except ValueError:
        return False
    numbers = data[8 + length :]
    if len(numbers) != max(end for _, end in places):
        return False
    return all(math.isfinite(value) for (value,) in struct.iter_unpack("<f", numbers))


def resumed(run: Path, names: str) -> Path | None:
    """What the trainer resumes from: its fixed name, or else the highest number."""
    fixed = run / "last.safetensors"
    numbered = {int(m[1]): p for p in run.glob("net-*") if (m := re.fullmatch(r"net-(\d+)\.safetensors", p.name))}
    if names != "numbered":
        return fixed if fixed.exists() else None
    return numbered[max(numbered)] if numbered else None


def cases() -> list[tuple[str, str, str, int, bool]]:
    """Some of them, or all in the long campaign."""
    return list(EVERY) if os.environ.get("CKPTGUARD_CAMPAIGN") == "full" else random.Random(22).sample(EVERY, SAMPLE)


@pytest.mark.campaign
@pytest.mark.parametrize("case", cases(), ids=lambda case: "-".join(map(str, case)))
def test_what_a_resume_takes_is_good_or_the_last_line_says_that_it_is_not(supervising, run, case):
    """By a reader of its own, whatever the command did; and each line says whose it is."""
    names, last, end, most, again = case
    one = supervising(TRAINER.format(case=(names, last, end, again)), "--max-rollbacks", str(most))
    process = one.start()
    if end == "asked":
        until(lambda: run.with_name("run.ready").exists() or process.poll() is not None, "the last save")
        process.terminate()
    done = one.finish()
    lines = done.stderr.splitlines()
    assert [line for line in lines if not line.startswith("ckptguard: ")] == []
    taken = resumed(run, names)
    if taken is None or not is_good(taken):
        assert lines, (taken, done.code)
        assert "a resume would take" in lines[-1], (taken, done)
    assert "Traceback" not in done.stderr
