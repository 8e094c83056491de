"""Every line of ours in a training's log begins with our name."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ckptguard
from ckptguard.values.own_log import LEAD, log


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("it begins", ()),
        ("%s of %d", ("a", 3)),
        ("two\nlines", ()),
        ("of %s", ("a name\nwith more",)),
        ("100%", ()),
        (OSError("x"), ()),
    ],
)
def test_each_line_begins_with_our_name(
    caplog: pytest.LogCaptureFixture, message: object, arguments: tuple[object, ...]
) -> None:
    """Also of a message with several lines, and the words stay."""
    log.warning(message, *arguments)
    lines = caplog.messages[-1].splitlines()
    assert all(line.startswith(LEAD) for line in lines)
    words = str(message) % arguments if arguments else str(message)
    assert "\n".join(line.removeprefix(LEAD) for line in lines) == words


def test_a_record_that_comes_again_begins_once_with_our_name(caplog: pytest.LogCaptureFixture) -> None:
    """A process that collects the log of others hands their records to the log of their name."""
    for message in ("it begins", "two\nlines"):
        log.warning(message)
        first = caplog.messages[-1]
        log.handle(caplog.records[-1])
        assert caplog.messages[-1] == first
        assert first.count(LEAD) == len(first.splitlines())


def test_wrong_arguments_raise_nothing_before_they_are_formatted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake of ours in a message never ends training."""
    monkeypatch.setattr(log, "handlers", [logging.NullHandler()])
    monkeypatch.setattr(log, "propagate", False)
    log.warning("%s and %s", "one")


def test_no_module_has_a_log_of_its_own() -> None:
    """They all write by the one that adds the name."""
    folder = Path(ckptguard.__file__).parent
    found = [p for p in folder.rglob("*.py") if re.search(r'getLogger\("ckptguard|getLogger\(__name__', p.read_text())]
    assert [path.name for path in found] == ["own_log.py"]


_TRAINING = """
import sys, torch, ckptguard
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.Adam(model.parameters())
sick = False
with ckptguard.TrainingGuard(sys.argv[1], model=model, optimizer=optimizer, daemon="off") as guard:
    for step, batch in guard.steps([torch.randn(2, 4) for _ in range(12)], total=int(sys.argv[2]), save_every=2):
        loss = model(batch).pow(2).mean() * (float("nan") if step == 5 and not sick else 1.0)
        sick = sick or step == 5
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        guard.observe(loss=loss)
        if step == int(sys.argv[3]):
            sys.exit()
"""


def _train(run: Path, total: int, stop_at: int) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", _TRAINING, str(run), str(total), str(stop_at)],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stderr.splitlines()


def test_a_training_says_in_one_line_each_what_it_does(tmp_path: Path) -> None:
    """It goes back and resumes: from where to where, how much is made again, and where the report is."""
    run = tmp_path / "run"
    first = _train(run, 12, 7)
    assert all(line.startswith(LEAD) for line in first), first
    (back,) = (line for line in first if "went back" in line)
    assert f"from step 5 to step 4, {run}/step-000000004: 1 step is made again" in back
    report = Path(re.search(r"the report: (\S+)$", back)[1])
    assert report.is_file()
    shard = next((run / "step-000000006").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x7f")
    second = _train(run, 12, 99)
    assert all(line.startswith(LEAD) for line in second), second
    (resumed,) = (line for line in second if "resumes" in line)
    assert f"had reached step 7, and resumes at step 4 from {run}/step-000000004" in resumed
    assert "3 steps" in resumed
    assert "made again; step-000000006 is bad" in resumed
