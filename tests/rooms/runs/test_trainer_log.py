"""A trainer's own log becomes a curve: as the trainers of today write it, and whatever else lies under that name."""

import json
import math
import os

import pytest

from ckptguard.errors import CkptguardError
from ckptguard.formats.structure import ReadProblem
from ckptguard.records.run import open_run
from ckptguard.runs import trainer_log
from ckptguard.runs.run_view import list_run
from ckptguard.runs.trainer_log import find_logs, read_log


def rows(run):
    """The updates in the run's own log."""
    run = open_run(str(run))
    log = find_logs(list_run(run).entries)[0]
    return log.key, read_log(run.storage, log)


def write(run, name, text):
    """A log beneath a run."""
    place = run / name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(text if isinstance(text, bytes) else text.encode())
    return place


def test_the_state_of_a_trainer(tmp_path):
    """What transformers itself writes: losses with bare NaN, learning rates, evaluations in between."""
    transformers = pytest.importorskip("transformers")
    state = transformers.TrainerState(global_step=30)
    state.log_history = [
        {"loss": 2.5, "grad_norm": 1.25, "learning_rate": 1e-3, "epoch": 0.1, "step": 10},
        {"eval_loss": 9.0, "epoch": 0.1, "step": 10},
        {"loss": math.nan, "grad_norm": math.inf, "learning_rate": 5e-4, "epoch": 0.2, "step": 20},
        {"train_runtime": 1.0, "train_loss": 2.0, "epoch": 0.2, "step": 30},
    ]
    (tmp_path / "checkpoint-30").mkdir()
    state.save_to_json(str(tmp_path / "checkpoint-30" / "trainer_state.json"))
    key, found = rows(tmp_path)
    assert key == "checkpoint-30/trainer_state.json"
    assert [repr(row) for row in found] == ["(10, 2.5, 1.25, None, 0.001)", "(20, nan, inf, None, 0.0005)"]


def test_the_newest_log_counts(tmp_path):
    """The log that was written last is read; of several that were written at once, the one of the highest step."""
    for step in (9, 10):
        text = json.dumps({"log_history": [{"step": step, "loss": 1.0}]})
        place = write(tmp_path, f"checkpoint-{step}/trainer_state.json", text)
        os.utime(place, ns=(10**18, 10**18))
    assert rows(tmp_path)[1] == [(10, 1.0, None, None, None)]
    os.utime(tmp_path / "checkpoint-9" / "trainer_state.json", ns=(10**18 + 1, 10**18 + 1))
    assert rows(tmp_path)[1] == [(9, 1.0, None, None, None)]


def test_the_table_of_lightning(tmp_path):
    """What Lightning's CSVLogger itself writes: columns that come later, sparse lines, several lines a step."""
    loggers = pytest.importorskip("lightning.pytorch.loggers")
    logger = loggers.CSVLogger(str(tmp_path), flush_logs_every_n_steps=1)
    logger.log_metrics({"lr-AdamW": 1e-3}, step=0)
    logger.log_metrics({"train_loss_step": 2.0, "epoch": 0}, step=0)
    logger.log_metrics({"val_loss": 7.0, "epoch": 0}, step=0)
    logger.log_metrics({"train_loss_step": math.nan, "grad_2.0_norm_total": 3.0, "epoch": 0}, step=1)
    logger.log_metrics({"train_loss_epoch": 4.0, "epoch": 0}, step=1)
    logger.log_metrics({"train_loss_step": math.inf, "epoch": 1}, step=2)
    logger.save()
    key, found = rows(tmp_path)
    assert key == "lightning_logs/version_0/metrics.csv"
    expected = ["(1, 2.0, None, None, 0.001)", "(2, nan, 3.0, None, None)", "(3, inf, None, None, None)"]
    assert [repr(row) for row in found] == expected


@pytest.mark.parametrize("name", ["loss", "train_loss", "train/loss", "my_loss", "Train_Loss"])
def test_names_that_users_give(tmp_path, name):
    """The loss is found under the usual names, and never in a column of a validation."""
    write(tmp_path, "metrics.csv", f"epoch,step,val_loss,{name}\n0,0,9.0,1.0\n")
    assert rows(tmp_path)[1] == [(1, 1.0, None, None, None)]


def test_a_table_that_is_being_written(tmp_path):
    """A last line that is cut short is left out."""
    write(tmp_path, "metrics.csv", "epoch,step,loss\n0,0,1.0\n0,1,2.0\n0,")
    assert [row[0] for row in rows(tmp_path)[1]] == [1, 2]


def test_of_a_long_table_the_end_counts(tmp_path, monkeypatch):
    """A table that is longer than the bound is not read as a whole."""
    monkeypatch.setattr(trainer_log, "_MOST_TABLE", 1000)
    lines = "".join(f"0,{step},1.5\n" for step in range(1000))
    write(tmp_path, "metrics.csv", f"epoch,step,loss\n{lines}")
    found = rows(tmp_path)[1]
    assert found[-1] == (1000, 1.5, None, None, None)
    assert 50 < len(found) < 200


STATES = [
    b"",
    b"{}",
    b"[]",
    b"[" * 200_000,
    b'{"log_history": 7}',
    b'{"log_history": [7, null, "x", {}, {"step": "1"}, {"step": -1, "loss": 1}, {"step": true, "loss": 1}]}',
    b'{"log_history": [{"step": 1, "loss": "<b>"}, {"step": 2, "loss": [1]}, {"step": 3, "loss": null}]}',
    b'{"log_history": [{"step": 1e400, "loss": 1}]}',
    b'{"log_history": [{"step": %s, "loss": 1}]}' % (b"9" * 400),
    b'{"log_history": [{"step": 5, "loss": %s}]}' % (b"9" * 400),
    b'{"log_history": [{"step": 1, "loss": 1}], "log_history": []}',
    b"\xff\xfe\x00",
]
TABLES = [
    b"",
    b"\n\n\n",
    b"a,b,c\n1,2,3\n",
    b"step\n1\n2\n",
    b"step,loss\n\xff,\xfe\n1,x\n2,\n-3,1\n1e5,1\n\xd9\xa3,1\n",
    b"step,loss\n%s,1\n" % (b"9" * 5000),
    b'step,loss\n"' + b"x" * 200_000,
    b"step,loss\n\0,1\n",
    b"step,loss,%s\n1,1,1\n" % (b"l" * 100_000),
    b"step,loss,step,loss\n1,1,1,1\n",
    b"step," + b"loss," * 20_000 + b"\n",
]


@pytest.mark.parametrize(
    ("name", "text"),
    [("trainer_state.json", text) for text in STATES] + [("metrics.csv", text) for text in TABLES],
)
def test_anything_else_does_no_harm(tmp_path, name, text):
    """Whatever is in the file: there is a list of possible updates, or one of the two expected exceptions."""
    write(tmp_path, f"checkpoint-5/{name}", text)
    try:
        found = rows(tmp_path)[1]
    except (CkptguardError, ReadProblem):
        return
    assert all(0 <= step < 10**12 and all(v is None or isinstance(v, float) for v in rest) for step, *rest in found)


def test_a_state_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    """A log beyond the bound is refused before it is read."""
    monkeypatch.setattr(trainer_log, "_MOST_BYTES", 10)
    write(tmp_path, "trainer_state.json", b'{"log_history": []}')
    with pytest.raises(ReadProblem):
        rows(tmp_path)
