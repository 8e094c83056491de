"""Every verb answers as the command of its name does, and refuses wrong use in a sentence."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import write_torch

import ckptguard
from ckptguard.documents.build import document as made
from ckptguard.documents.build import fields
from ckptguard.errors import CkptguardError, RefusedError, SettingsError
from ckptguard.records.run import open_run
from ckptguard.runs.run_view import open_view
from ckptguard.training.rollback.incident_log import begin_incident
from ckptguard.values.settings import Settings


def as_json(command: str, result: Any, form: str = "", **parts: Any) -> dict[str, Any]:
    """The document that the command line would print of a result."""
    return made(command, **parts, **fields(result, form))


def without_times(found: Any) -> Any:
    """The same without how long it took."""
    if isinstance(found, dict):
        return {key: without_times(value) for key, value in found.items() if key not in ("seconds", "checked_at")}
    return [without_times(value) for value in found] if isinstance(found, list) else found


def test_verify_says_what_the_command_says(verified: Path, document: Callable[..., Any], flip) -> None:
    """Of a run with a damaged checkpoint, of its newest one, of one step, and of one file."""
    flip(verified / "net-200.pt")
    for options, flags in (({}, ()), ({"newest": 1}, ("--newest", 1)), ({"step": 200}, ("--step", 200))):
        report = ckptguard.verify(verified, record=False, **options)
        said = document("verify", verified, "--no-record", *flags)[1]
        assert without_times(as_json("verify", report, "results.VerifyReport")) == without_times(said)
    report = ckptguard.verify(verified / "net-200.pt")
    assert not report.ok
    assert report.outcome == "bad"
    assert report.findings


def test_verify_holds_a_download_against_its_sums(root: Path, process) -> None:
    """A right list is good, another file's digest is bad, and a reference of other shapes is not matched."""
    from hashlib import sha256

    name = write_torch(root, 1, seed=1)
    sums = root.parent / "SHA256SUMS"
    sums.write_text(f"{sha256((root / name).read_bytes()).hexdigest()}  {name}\n")
    assert ckptguard.verify(root / name, sums=sums).ok
    sums.write_text(f"{'0' * 64}  {name}\n")
    assert ckptguard.verify(root / name, sums=sums).outcome == "bad"
    other = root.parent / "other.pt"
    torch.save({"w": torch.ones(3)}, other)
    assert not ckptguard.verify(root / name, reference=other).ok


def test_known_good_is_that_of_the_command(verified: Path, document: Callable[..., Any], flip) -> None:
    """The newest one, one before a step, and after silent damage the one that is left."""
    for options, flags in (({}, ()), ({"before_step": 300}, ("--before-step", 300)), ({"read": True}, ("--read",))):
        assert (
            as_json("known-good", ckptguard.known_good(verified, **options))
            == (document("known-good", verified, *flags)[1])
        )
    flip(verified / "net-300.pt")
    assert ckptguard.known_good(verified, read=True).path.endswith("net-200.pt")


def test_checkpoints_incidents_and_diff_are_those_of_the_commands(verified: Path, document: Callable[..., Any]) -> None:
    """One list of each, and one comparison."""
    begin_incident(open_run(str(verified)), step=250, cause="nan_loss", reason="five in a row", evidence={})
    states = ckptguard.checkpoints(verified)
    assert made("list", checkpoints=states)["checkpoints"] == document("list", verified)[1]["checkpoints"]
    told = ckptguard.incidents(verified)
    assert [i.id for i in told] == [i["id"] for i in document("incidents", verified)[1]["incidents"]] != []
    a, b = verified / "net-100.pt", verified / "net-200.pt"
    found, said = ckptguard.diff(a, b), document("diff", a, b)[1]
    assert (found.same, found.counts, len(found.changes)) == (said["same"], said["counts"], len(said["changes"]))


def test_restore_and_rollback_do_what_the_commands_do(verified: Path, tmp_path: Path, document, flip) -> None:
    """The same copy, the same plan, and afterwards the same newest checkpoint."""
    done, said = ckptguard.restore(verified, tmp_path / "a"), document("restore", verified, "--to", tmp_path / "b")[1]
    assert Path(done.path).read_bytes() == Path(said["path"]).read_bytes() == (verified / "net-300.pt").read_bytes()
    assert ckptguard.restore(verified, to=tmp_path / "c", step=100).path.endswith("net-100.pt")
    plan = ckptguard.rollback(verified, step=200, dry_run=True)
    assert (
        as_json("rollback", plan, target=str(verified)) == document("rollback", verified, "--step", 200, "--dry-run")[1]
    )
    assert ckptguard.rollback(verified, to="net-200.pt").known_good.path.endswith("net-200.pt")
    assert not (verified / "net-300.pt").exists()


def test_a_rollback_closes_the_incidents_about_what_it_moved(verified: Path, flip) -> None:
    """A plan closes none."""
    flip(verified / "net-300.pt")
    ckptguard.verify(verified)
    ckptguard.rollback(verified, dry_run=True)
    assert [incident.state for incident in ckptguard.incidents(verified)] == ["open"]
    ckptguard.rollback(verified)
    assert [incident.state for incident in ckptguard.incidents(verified)] == ["closed"]


def test_a_sealed_checkpoint_is_known_good_and_its_damage_is_seen(root: Path, flip) -> None:
    """Nothing was set up before. One that is sick is refused, and what was sealed stays known-good."""
    state = {"w": torch.randn(200, 200)}
    torch.save(state, root / "step-1.pt")
    report = ckptguard.seal(root / "step-1.pt", metrics={"loss": 0.5})
    assert report.ok
    assert ckptguard.known_good(root).path == str(root / "step-1.pt")
    torch.save({"w": torch.full((200, 200), float("nan"))}, root / "step-2.pt")
    with pytest.raises(RefusedError) as refused:
        ckptguard.seal(root / "step-2.pt")
    assert refused.value.outcome in ("bad", "suspect")
    assert ckptguard.known_good(root).path == str(root / "step-1.pt")
    flip(root / "step-1.pt")
    assert ckptguard.verify(root / "step-1.pt").outcome == "bad"


def test_a_folder_and_one_further_down_are_sealed(root: Path) -> None:
    """A folder of model files; and with `run` a checkpoint that does not lie directly in it."""
    (root / "nets" / "checkpoint-5").mkdir(parents=True)
    torch.save({"w": torch.randn(100, 100)}, root / "nets" / "checkpoint-5" / "pytorch_model.bin")
    assert ckptguard.seal(root / "nets" / "checkpoint-5", run=root).ok
    assert ckptguard.known_good(root).path == str(root / "nets" / "checkpoint-5")
    torch.save({"w": torch.randn(100, 100)}, root / "nets" / "step-6.pt")
    assert ckptguard.seal(root / "nets" / "step-6.pt", run=root).ok
    assert not (root / "nets" / "_ckptguard").exists()


def test_sealing_again_without_a_change_is_no_new_generation(root: Path) -> None:
    """The second seal finds what was sealed."""
    torch.save({"w": torch.randn(200, 200)}, root / "step-1.pt")
    first, second = (ckptguard.seal(root / "step-1.pt").checkpoints[0].id for _ in range(2))
    assert first == second is not None


def test_metrics_go_with_what_is_sealed_and_with_nothing_else(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Sealed again they change nothing, and a save that is refused leaves none to the next one."""
    path = root / "last.pt"

    def metrics() -> list[dict[str, float]]:
        view = open_view(str(root), Settings())
        (checkpoint,) = view.checkpoints
        manifest = view.history.manifest(view.current(checkpoint))  # type: ignore[arg-type]
        return manifest.given_metrics() if manifest is not None else {}  # type: ignore[return-value]

    torch.save({"w": torch.randn(200, 200)}, path)
    ckptguard.seal(path, metrics={"loss": 0.5})
    assert metrics() == {"loss": 0.5}
    ckptguard.seal(path, metrics={"loss": 0.1})
    assert "metrics stay" in caplog.text
    assert metrics() == {"loss": 0.5}
    torch.save({"w": torch.randn(200, 200)}, path)
    ckptguard.seal(path)
    assert metrics() == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [("policy", 3), ("settings", 3), ("settings", {"setle": 1}), ("saving", 3), ("deadlines", {"ranks": 3})],
)
def test_a_guards_option_of_another_kind_is_one_sentence(root: Path, name: str, value: object) -> None:
    """The option is named, nothing is written, and the hint says what to write."""
    with pytest.raises(SettingsError) as caught:
        ckptguard.TrainingGuard(root / "new", model=torch.nn.Linear(2, 2), **{name: value})  # type: ignore[arg-type]
    assert name in caught.value.message
    assert caught.value.hint
    assert not (root / "new").exists()


def test_a_guard_takes_a_dict_of_settings(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They count before the environment, and what they leave out is the environment's."""
    monkeypatch.setenv("CKPTGUARD_KEEP_GOOD", "5")
    with ckptguard.TrainingGuard(
        root, model=torch.nn.Linear(40, 40), daemon="off", settings={"allow_nonfinite": ["*"]}
    ) as guard:
        guard.save(step=1)
    assert ckptguard.Deadlines(daemon=1).daemon == 1
    with pytest.raises(SettingsError, match="ranks"):
        ckptguard.Deadlines(ranks="long")  # type: ignore[arg-type]


WRONG: dict[str, Callable[[Path], object]] = {
    "no path": lambda run: ckptguard.verify(3),
    "an empty path": lambda run: ckptguard.verify(""),
    "bytes": lambda run: ckptguard.known_good(os.fsencode(run)),
    "nothing there": lambda run: ckptguard.verify(run / "nothing"),
    "no settings": lambda run: ckptguard.verify(run, settings=3),
    "an unknown setting": lambda run: ckptguard.verify(run, settings={"setle": 0}),
    "a setting of another kind": lambda run: ckptguard.verify(run, settings={"settle": "soon"}),
    "a setting that is no name": lambda run: ckptguard.verify(run, settings={3: 4}),
    "a step that is none": lambda run: ckptguard.verify(run, step="300"),
    "a step below zero": lambda run: ckptguard.restore(run, run.parent / "x", step=-1),
    "none of the newest": lambda run: ckptguard.verify(run, newest=0),
    "a step that is not there": lambda run: ckptguard.restore(run, run.parent / "x", step=7),
    "two places to go back to": lambda run: ckptguard.rollback(run, to="net-100.pt", step=100),
    "a place that is not there": lambda run: ckptguard.rollback(run, to="net-7.pt"),
    "a full folder": lambda run: ckptguard.restore(run, run.parent),
    "nothing to seal": lambda run: ckptguard.seal(run / "nothing.pt"),
    "a run to seal": lambda run: ckptguard.seal(run, run=run),
    "metrics that are no dict": lambda run: ckptguard.seal(run / "net-100.pt", metrics=[0.5]),
    "a number to go back to": lambda run: ckptguard.rollback(run, to=100),
    "no metrics": lambda run: ckptguard.seal(run / "net-100.pt", metrics={"loss": "low"}),
    "no device": lambda run: ckptguard.load(run, map_location="gpu"),
    "a step of one file": lambda run: ckptguard.load(run / "net-100.pt", step=100),
    "no reference": lambda run: ckptguard.verify(run, reference=run / "nothing.pt"),
    "no sums": lambda run: ckptguard.verify(run / "net-100.pt", sums=run / "nothing"),
    "a checkpoint for a run": lambda run: ckptguard.checkpoints(run / "net-100.pt"),
    "a NUL in a path": lambda run: ckptguard.verify("net\0-100.pt"),
    "a NUL in the name of sums": lambda run: ckptguard.verify(run / "net-100.pt", sums="\0"),
    "a NUL in what training starts from": lambda run: ckptguard.check_pretrained("net\0-100.pt"),
    "a NUL in a replica": lambda run: ckptguard.known_good(run / "nothing", settings={"replicas": ["\0"]}),
    "no such run": lambda run: ckptguard.incidents(run / "nothing"),
    "no checkpoint to compare": lambda run: ckptguard.diff(run, run / "net-100.pt"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_use_is_an_error_of_the_tree(verified: Path, wrong: str) -> None:
    """One sentence, and nothing is written."""
    before = sorted(p for p in verified.rglob("*"))
    with pytest.raises(CkptguardError) as caught:
        WRONG[wrong](verified)
    assert "\n" not in caught.value.message
    assert sorted(p for p in verified.rglob("*")) == before


def test_settings_of_a_call_count_before_the_environment(verified: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And those that a call leaves out are the environment's."""
    torch.save({"w": torch.tensor([1.0, float("nan")])}, verified.parent / "nan.pt")
    monkeypatch.setenv("CKPTGUARD_ALLOW_NONFINITE", "other")
    assert not ckptguard.verify(verified.parent / "nan.pt").ok
    assert ckptguard.verify(verified.parent / "nan.pt", settings={"allow_nonfinite": ["w"]}).ok
    monkeypatch.setenv("CKPTGUARD_ALLOW_NONFINITE", "w")
    assert ckptguard.verify(verified.parent / "nan.pt", settings={"workers": 1}).ok
    mistyped = "_".join(("CKPTGUARD", "SETLE"))
    monkeypatch.setenv(mistyped, "1")
    with pytest.raises(SettingsError, match=mistyped):
        ckptguard.verify(verified)


@pytest.mark.parametrize("call", [ckptguard.check_pretrained, ckptguard.verify, ckptguard.known_good, open_run])
def test_an_empty_place_is_a_mistake(call, tmp_path, monkeypatch):
    """It is an unset variable, and never means the current folder."""
    write_torch(tmp_path, 1, seed=1)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ckptguard.SettingsError, match=r"is no path or URL|is empty"):
        call("")
