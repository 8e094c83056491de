"""What ``verify`` says to people: one cause is one line, the tensor first, and what to do once at the end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.runs import save_file, write_safetensors

from ckptguard.documents.report_lines import finding_lines
from ckptguard.values.verdict import Finding, Severity

SHARD = "model-00002-of-00003.safetensors"
State = dict[str, torch.Tensor]


def weights(layers: int) -> State:
    """Matrices that differ."""
    generator = torch.Generator().manual_seed(layers)
    return {f"layers.{i}.weight": torch.randn(16, 16, generator=generator) for i in range(layers)}


def save_sharded(folder: Path, layers: int = 12, *, broken: Callable[[State], State] = dict) -> Path:
    """A model in three shards, as `save_pretrained` writes it."""
    folder.mkdir(parents=True)
    state, shards = broken(weights(layers)), {}
    for number in range(3):
        name = f"model-{number + 1:05d}-of-00003.safetensors"
        part = {key: state[key] for key in [*state][number::3]}
        save_file(part, folder / name)
        shards.update(dict.fromkeys(part, name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    (folder / "config.json").write_text("{}")
    return folder


def cut(path: Path) -> None:
    """Lose the end."""
    path.write_bytes(path.read_bytes()[:-1500])


def empty(path: Path) -> None:
    """Lose all of it."""
    path.write_bytes(b"")


@pytest.mark.parametrize("harm", [cut, empty, Path.unlink])
@pytest.mark.parametrize("sealed", [False, True])
def test_a_harmed_shard_is_one_line(invoke, root: Path, harm: Callable[[Path], None], sealed: bool) -> None:
    """What follows from it is not told again. Of a sealed one the tensors that were hit are another line."""
    save_sharded(root / "model-1")
    assert invoke("verify", root).exit_code == 0
    folder = save_sharded(root / "model-2")
    if sealed:
        assert invoke("verify", root).exit_code == 0
    harm(folder / SHARD)
    result = invoke("verify", root)
    lines = [line for line in result.stdout.splitlines() if line.startswith("  ")]
    assert result.exit_code in (3, 4)
    assert len([line for line in lines if "[digests]" not in line]) == 1, result.stdout
    assert len(lines) <= 1 + sealed, result.stdout
    assert SHARD in lines[0]
    assert "accept" not in result.stdout
    listed = next(line for line in invoke("list", root).stdout.splitlines() if line.startswith("model-2"))
    assert len(listed) < 180


def test_many_tensors_are_one_line_and_one_hint(invoke, root: Path) -> None:
    """The tensor comes first; the option is named once, at the end."""
    save_sharded(root / "model-1", broken=lambda state: {name: value * float("nan") for name, value in state.items()})
    result = invoke("verify", root)
    lines = result.stdout.splitlines()
    assert result.exit_code == 3
    assert [line.split(":")[0] for line in lines if line.startswith("  ")] == [
        "  error [finite] layers.0.weight and 11 more"
    ]
    assert result.stdout.count("--allow-nonfinite") == 1
    assert "--allow-nonfinite layers.0.weight" in lines[-3]
    assert lines[-2] == f"what is known about it: ckptguard incident {root}"
    assert "--allow" not in invoke("list", root).stdout


def test_other_tensors_are_one_question_with_its_answer(invoke, root: Path) -> None:
    """The command that answers it can be pasted."""
    save_sharded(root / "model-1")
    save_sharded(root / "model-2", layers=20)
    invoke("verify", root)
    result = invoke("verify", root)
    assert [line.split(":")[0] for line in result.stdout.splitlines() if line.startswith("  ")] == [
        "  sickness [schema] layers.12.weight and 7 more"
    ]
    hint = next(line for line in result.stdout.splitlines() if "ckptguard accept" in line)
    assert invoke(*hint.partition("ckptguard ")[2].split()).exit_code == 0
    assert "accept" not in invoke("verify", root).stdout


def test_a_suspicion_says_how_it_is_lifted(invoke, root: Path) -> None:
    """Weights that died are one line, and an incident of numbers."""
    save_sharded(root / "model-1")
    invoke("verify", root)
    save_sharded(root / "model-2", broken=lambda state: {name: value * 0 + 1 for name, value in state.items()})
    result = invoke("verify", root)
    assert result.exit_code == 4
    assert [line.split(":")[0] for line in result.stdout.splitlines() if line.startswith("  ")] == [
        "  sickness [drift] layers.0.weight"
    ]
    hint = next(line for line in result.stdout.splitlines() if "ckptguard clear" in line)
    assert invoke(*hint.partition("ckptguard ")[2].split()).exit_code == 0
    assert invoke("verify", root).exit_code == 0


def test_a_downloaded_model_is_no_training(invoke, tmp_path: Path) -> None:
    """Nobody would resume from it."""
    result = invoke("verify", save_sharded(tmp_path / "bert"))
    assert result.exit_code == 0
    assert "resume" not in result.stdout


NAMES = st.text("abc.é\n\x1b", min_size=1, max_size=6)


@given(
    st.lists(
        st.builds(
            Finding,
            check=st.sampled_from(["finite", "schema"]),
            severity=st.sampled_from(list(Severity)),
            message=st.sampled_from(["3 NaN of 4", "5 NaN of 70, at 1.5e3", "gone", "other"]),
            file=st.none() | NAMES,
            tensor=st.none() | NAMES,
        ),
        max_size=12,
    )
)
def test_equal_findings_are_one_line_with_a_count(findings: list[Finding]) -> None:
    """Never more lines than kinds of findings, none is lost, and nothing in a name reaches the terminal raw."""
    said = [line.text for line in finding_lines(findings, "ckpt")]
    assert len(said) <= len({(f.check, f.severity, f.message, bool(f.file), bool(f.tensor)) for f in findings})
    assert not any("\n" in line or "\x1b" in line for line in said)
    for finding in findings:
        assert any(f"[{finding.check}]" in line and finding.severity.value in line for line in said)


def test_model_files_at_the_root_are_called_by_the_folder(root, invoke):
    """In a document their path is "."; people know the folder's name."""
    write_safetensors(root, 1, seed=1)
    for file in (root / "model-1").iterdir():
        (root / file.name).write_bytes(file.read_bytes())
    for command in ("verify", "list"):
        said = invoke(command, root).stdout
        assert any(line.split()[:2] in (["good", "run"], ["run", "good"]) for line in said.splitlines()), said
