"""What a user points at: stray files and folders, checkpoints of a run, runs."""

import hashlib
import os

import pytest
import torch
from support.runs import QUICK, state_dict, write_safetensors, write_sharded, write_torch

from ckptguard.errors import NotFoundError, SettingsError
from ckptguard.runs.work import Work
from ckptguard.values.verdict import Outcome, Severity
from ckptguard.verification.target import Selection, verify_target


def test_a_stray_file_is_judged_and_nothing_is_written(tmp_path):
    """A lone file is GOOD, and its folder is as before."""
    write_torch(tmp_path, 100, seed=1)
    report = verify_target(str(tmp_path / "net-100.pt"), QUICK)
    assert (report.kind, report.outcome) == ("file", Outcome.GOOD)
    assert [(c.path, c.step, c.id) for c in report.checkpoints] == [("net-100.pt", 100, None)]
    assert os.listdir(tmp_path) == ["net-100.pt"]


def test_a_stray_folder_is_a_checkpoint(tmp_path):
    """A downloaded model folder; paths in findings are relative to it."""
    path = write_sharded(tmp_path, 1, seed=1)
    report = verify_target(str(tmp_path / path), QUICK)
    assert (report.kind, report.outcome) == ("checkpoint", Outcome.GOOD)
    (tmp_path / path / "model-00002-of-00003.safetensors").unlink()
    report = verify_target(str(tmp_path / path), QUICK)
    assert report.outcome is Outcome.INCOMPLETE
    assert "model-00002-of-00003.safetensors" in {f.file for f in report.checkpoints[0].findings}


def test_a_run_is_recorded_and_a_checkpoint_of_it_too(tmp_path):
    """Verifying a run writes verdicts; a later look at one of its checkpoints uses them."""
    for step in (100, 200):
        write_torch(tmp_path, step, seed=step)
    report = verify_target(str(tmp_path), QUICK)
    assert (report.kind, report.outcome) == ("run", Outcome.GOOD)
    assert [str(c.id) for c in report.checkpoints] == ["100.1", "200.1"]
    one = verify_target(str(tmp_path / "net-200.pt"), QUICK)
    assert (one.kind, str(one.checkpoints[0].id), one.checkpoints[0].path) == ("file", "200.1", "net-200.pt")


@pytest.mark.parametrize("below", ["exp", "group/exp"])
def test_a_folder_of_runs_is_no_run(tmp_path, below):
    """The records of its checkpoints are in the runs: it is refused, and nothing is written. One checkpoint of its own
    makes it a run again, and so do its own records."""
    runs = [tmp_path / f"{below}{number}" for number in range(5)]
    for run in runs:
        run.mkdir(parents=True)
        write_torch(run, 100, seed=1)
    (tmp_path / "notes").mkdir()
    assert verify_target(str(tmp_path), QUICK, Selection(record=False)).outcome is Outcome.GOOD
    for run in runs:
        verify_target(str(run), QUICK)
    with pytest.raises(
        NotFoundError, match=f"is no run: its checkpoints belong to the runs {below}0, .* and 2 more in"
    ):
        verify_target(str(tmp_path), QUICK)
    assert not (tmp_path / "_ckptguard").exists()
    write_torch(tmp_path, 200, seed=1)
    assert len(verify_target(str(tmp_path), QUICK).checkpoints) == 6
    (tmp_path / "net-200.pt").unlink()
    assert len(verify_target(str(tmp_path), QUICK).checkpoints) == 5


def test_no_record_writes_nothing(tmp_path):
    """--no-record leaves a run without a trace."""
    write_torch(tmp_path, 100, seed=1)
    assert verify_target(str(tmp_path), QUICK, Selection(record=False)).outcome is Outcome.GOOD
    assert os.listdir(tmp_path) == ["net-100.pt"]


def test_choosing_by_step_and_newest(tmp_path):
    """--step and --newest choose; an absent step is not found."""
    for step in (100, 200, 300):
        write_torch(tmp_path, step, seed=step)
    assert [c.step for c in verify_target(str(tmp_path), QUICK, Selection(step=200)).checkpoints] == [200]
    assert [c.step for c in verify_target(str(tmp_path), QUICK, Selection(newest=2)).checkpoints] == [200, 300]
    with pytest.raises(NotFoundError):
        verify_target(str(tmp_path), QUICK, Selection(step=7))


def test_nothing_there(tmp_path):
    """Absent paths, folders without checkpoints, and FIFOs are not found; nothing hangs."""
    os.mkfifo(tmp_path / "pipe.pt")
    (tmp_path / "empty").mkdir()
    for name in ("absent", "empty", "pipe.pt"):
        with pytest.raises(NotFoundError):
            verify_target(str(tmp_path / name), QUICK)


def test_a_fifo_inside_a_checkpoint_is_named_and_not_opened(tmp_path):
    """A tensor file that is a FIFO makes the checkpoint BAD; the scan does not block on it."""
    path = write_safetensors(tmp_path, 1, seed=1)
    os.mkfifo(tmp_path / path / "extra.safetensors")
    report = verify_target(str(tmp_path / path), QUICK)
    assert report.outcome is Outcome.BAD
    assert [f.file for f in report.checkpoints[0].findings if f.severity is Severity.ERROR] == ["extra.safetensors"]


def test_a_link_out_of_the_checkpoint_is_not_followed(tmp_path):
    """Weights behind a link that leads elsewhere were not read, so they are not good."""
    path = write_safetensors(tmp_path, 1, seed=1)
    (tmp_path / path / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    (tmp_path / path / "model.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    assert verify_target(str(tmp_path / path), QUICK).outcome is Outcome.BAD


def test_a_named_checksum_file(tmp_path):
    """A wrong sum and a missing file are named."""
    folder, list_of_sums = tmp_path / write_sharded(tmp_path, 1, seed=1), tmp_path / "SUMS"
    names, what = sorted(os.listdir(folder)), Selection(check_sums=str(list_of_sums))
    lines = [f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}" for name in names]
    list_of_sums.write_text("\n".join(lines))
    assert verify_target(str(folder), QUICK, what).outcome is Outcome.GOOD
    list_of_sums.write_text("\n".join([*lines[1:], f"{'0' * 64}  {names[0]}", f"{'0' * 64}  absent.bin"]))
    report = verify_target(str(folder), QUICK, what)
    assert report.outcome is Outcome.BAD
    wrong = [f for f in report.checkpoints[0].findings if f.severity is Severity.ERROR]
    assert {(f.check, f.file) for f in wrong} == {("digests", names[0]), ("digests", "absent.bin")}
    list_of_sums.write_text("no sums here\n")
    with pytest.raises(SettingsError):
        verify_target(str(folder), QUICK, what)


def test_a_reference_decides_about_keys(tmp_path):
    """--reference: keys, shapes and dtypes of another file."""
    write_torch(tmp_path, 1, seed=1)
    state = state_dict(2)
    state["layers.0.query.weight"] = state["layers.0.query.weight"].double()
    torch.save(state, tmp_path / "net-2.pt")
    report = verify_target(str(tmp_path / "net-2.pt"), QUICK, Selection(reference=str(tmp_path / "net-1.pt")))
    assert report.outcome is Outcome.BAD
    assert [f.tensor for f in report.checkpoints[0].findings if f.check == "schema"] == ["layers.0.query.weight"]


def test_allowed_nonfinite_patterns_are_kept_in_the_run(tmp_path):
    """--allow-nonfinite makes a buffer that must be infinite GOOD, and the run remembers it."""
    state = state_dict(1)
    state["bias.table"] = torch.tensor([[1.0, float("inf")], [2.0, 3.0]])
    torch.save(state, tmp_path / "net-1.pt")
    assert verify_target(str(tmp_path), QUICK).outcome is Outcome.BAD
    allowed = QUICK.changed(allow_nonfinite=("bias.*",))
    assert verify_target(str(tmp_path), allowed).outcome is Outcome.GOOD
    assert verify_target(str(tmp_path), QUICK).outcome is Outcome.GOOD


def test_unreadable_is_pending_and_could_not_tell(tmp_path):
    """A scanner that cannot read gives no verdict: neither good nor bad."""
    from ckptguard.errors import DeniedError

    write_torch(tmp_path, 1, seed=1)

    def denied(storage, keys, options, progress):
        raise DeniedError("permission denied", key=keys[0])

    for target in (tmp_path, tmp_path / "net-1.pt"):
        report = verify_target(str(target), QUICK, work=Work(scanner=denied))
        assert report.outcome is Outcome.PENDING
        assert report.could_not_tell
