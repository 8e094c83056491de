"""What a click reads: as the command line says it, counted, remembered, and bounded."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptguard_daemon import reading
from ckptguard_daemon.dashboard import compare, verbs
from ckptguard_daemon.dashboard.heat import MOST, choose, first_bad
from hypothesis import given
from hypothesis import strategies as st
from support.daemon_process import until
from support.dashboards import Dashboard, Opener
from support.http_documents import assert_like, example
from support.records_on_disk import at
from support.tiny_run import TINY, name_of
from support.views import look

from ckptguard.documents.build import fields
from ckptguard.inspect.diff import diff as diff_by_reading
from ckptguard.inspect.show import show
from ckptguard.keep.quarantine import mark_suspect
from ckptguard.records.incidents import open_incident
from ckptguard.records.run import open_run
from ckptguard.retention.pin import pin
from ckptguard.values.ids import run_id_of
from ckptguard.values.remembered import Remembered
from ckptguard.values.verdict import Outcome

SERIES = "model-#"


def name(step: int, generation: int = 1) -> str:
    """A generation's name."""
    return f"{SERIES}/{step:012d}.{generation}"


def write(root: str, step: int, tensors: dict[str, Any]) -> None:
    """Save one safetensors file of float32 tensors."""
    header, data, end = {}, b"", 0
    for key, value in tensors.items():
        array = np.asarray(value, dtype="<f4")
        header[key] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [end, end + array.nbytes]}
        data, end = data + array.tobytes(), end + array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    folder = Path(root, name_of(step))
    folder.mkdir(exist_ok=True)
    (folder / "tmp-model").write_bytes(len(text).to_bytes(8, "little") + text + data)
    (folder / "tmp-model").rename(folder / "model.safetensors")


@pytest.fixture
def sick(open_dashboard: Opener, tmp_path: Path) -> tuple[Dashboard, str]:
    """A run whose third checkpoint has NaN and Inf, and whose fourth one is good again."""
    root = str(tmp_path / "run")
    Path(root).mkdir()
    for step in (1, 2, 3, 4):
        weights = np.arange(12.0).reshape(3, 4) * step
        if step == 3:
            weights[1, 1], weights[2, 2] = math.nan, math.inf
        write(root, step, {"model.same": [1.0, 2.0], "model.w": weights, **({"model.new": [5.0]} if step == 4 else {})})
    dashboard = open_dashboard(root)
    dashboard.make_passes(2)
    return dashboard, root


def test_a_checkpoint_is_what_show_says(sick: tuple[Dashboard, str]) -> None:
    """Files, tensors, magnitudes, digests, verdicts and what is not finite are those of its records."""
    dashboard, root = sick
    for step in (1, 2, 3, 4):
        found = dashboard.ask("checkpoint", run=root, name=name(step))
        shown = show(f"{root}/{name_of(step)}", TINY)
        [file] = shown.manifest.files
        assert shown.verdict is not None
        assert (found["id"], found["outcome"], found["bytes"]) == (str(shown.id), shown.verdict.outcome, file.size)
        assert [(f["path"], f["size"], f["digest"]) for f in found["files"]] == [
            ("model.safetensors", file.size, file.envelope)
        ]
        for tensor, line in zip(file.tensors, found["tensors"], strict=True):
            assert [line[key] for key in ("name", "role", "dtype", "largest", "rms", "zeros")] == [
                tensor.name,
                tensor.role,
                tensor.dtype,
                tensor.largest,
                tensor.rms,
                tensor.zeros,
            ]
            assert tensor.span is not None
            assert line["digest"] == file.spans[tensor.span].blake3
        counted = {(t["name"], t["nan"], t["inf"]) for t in found["tensors"] if t["nan"] is not None}
        assert counted == ({("model.w", 1, 1)} if step == 3 else set())
        assert found["sentence"].startswith(f"{found['outcome']}: ")
        [verdict] = found["verdicts"]
        assert (verdict["outcome"], verdict["counts"]) == (found["outcome"], True)
        assert found["reads"] == dashboard.requests.total()
        dashboard.requests.clear()


def test_the_heat_map_is_of_manifests(sick: tuple[Dashboard, str]) -> None:
    """Each cell is a manifest's number; what is not finite is outlined by its verdict; nothing is read twice."""
    dashboard, root = sick
    heat = dashboard.ask("heat", run=root)
    assert [c["name"] for c in heat["checkpoints"]] == [name(step) for step in (1, 2, 3, 4)]
    rows = {tensor["name"]: number for number, tensor in enumerate(heat["tensors"])}
    assert heat["largest"][rows["model.w"]] == [11.0, 22.0, 33.0, 44.0]
    assert heat["largest"][rows["model.new"]] == [None, None, None, 5.0]
    assert heat["bad"] == [[rows["model.w"], 2, "1 NaN, 1 Inf"]]
    assert heat["first_bad"] == [rows["model.w"], 2]
    assert heat["reads"] == dashboard.requests.total() > 0
    dashboard.requests.clear()
    assert {**dashboard.ask("heat", run=root), "reads": 0} == {**heat, "reads": 0}
    assert dashboard.requests.total() == 0
    window = dashboard.ask("heat", run=root, first=2, last=3)
    assert [c["step"] for c in window["checkpoints"]] == [2, 3]
    assert window["more"] == {"before": 1, "after": 1, "between": 0}
    assert dashboard.ask("heat", run=root, first=9)["checkpoints"] == []
    thin = dashboard.ask("heat", run=root, most=3)
    assert (len(thin["checkpoints"]), thin["more"]["between"]) == (3, 1)
    assert "bad" in {c["outcome"] for c in thin["checkpoints"]}


def test_a_run_that_begins_anew_shows_its_own_numbers(open_dashboard: Opener, tmp_path: Path) -> None:
    """What is remembered of a manifest does not outlive it: another one may have its name."""
    root = str(tmp_path / "run")
    Path(root).mkdir()
    write(root, 1, {"model.w": [1.0, 2.0]})
    dashboard = open_dashboard(root)
    dashboard.make_passes()
    assert dashboard.ask("heat", run=root)["largest"] == [[2.0]]
    os.rename(root, f"{root}-old")
    dashboard.make_passes()
    Path(root).mkdir()
    write(root, 1, {"model.w": [1.0, 7.0]})

    def shown() -> bool:
        dashboard.make_passes()
        return bool(dashboard.ask("heat", run=root)["largest"] == [[7.0]])

    until(shown, "the numbers of the new run")  # while records go, a pass records nothing


def test_manifests_are_compared_as_bytes_are(sick: tuple[Dashboard, str]) -> None:
    """Which tensors differ is the same by manifests and by reading; only reading says by how much."""
    dashboard, root = sick
    for a, b in ((1, 2), (2, 3), (3, 4), (4, 4)):
        quick = dashboard.ask("diff", run=root, a=name(a), b=name(b))
        whole = dashboard.ask("diff", run=root, a=name(a), b=name(b), read=1)
        truth = diff_by_reading(f"{root}/{name_of(a)}", f"{root}/{name_of(b)}", TINY)
        changes = {(c.name, c.change) for c in truth.changes}
        for found in (quick, whole):
            assert {(c["name"], c["change"]) for c in found["changes"]} == changes
            assert (found["same"], found["counts"]) == (truth.same, truth.counts)
            assert (found["a"]["name"], found["b"]["name"]) == (name(a), name(b))
        assert (quick["would_read"] > 0) == any(change == "changed" for _, change in changes)
        norms = [c["difference"] and c["difference"]["relative_l2"] for c in whole["changes"]]
        assert norms == [c.difference and c.difference.relative_l2 for c in truth.changes]
    assert {
        c["name"]: (c["b"]["nan"], c["b"]["inf"])
        for c in dashboard.ask("diff", run=root, a=name(2), b=name(3))["changes"]
    } == {"model.w": (1, 1)}


def test_one_comparison_at_a_time_reads(sick: tuple[Dashboard, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one is told so, and one that takes too long ends in a sentence; then the next may read."""
    dashboard, root = sick
    told: list[Any] = []
    real = compare.diff_sources

    def slow(*args: Any, **named: Any) -> Any:
        told.append(dashboard.ask("diff", run=root, a=name(1), b=name(2), read=1))
        return real(*args, **named)

    monkeypatch.setattr(compare, "diff_sources", slow)
    assert dashboard.ask("diff", run=root, a=name(1), b=name(2), read=1)["read"]
    assert told == [(423, "busy")]
    monkeypatch.setattr(compare, "diff_sources", real)
    monkeypatch.setattr(compare, "MOST_READING", -1.0)
    assert dashboard.ask("diff", run=root, a=name(1), b=name(2), read=1) == (503, "could_not_tell")
    monkeypatch.setattr(compare, "MOST_READING", 60.0)
    assert dashboard.ask("diff", run=root, a=name(1), b=name(2), read=1)["read"]


def test_shards_are_judged_one_by_one(open_dashboard: Opener, tmp_path: Path) -> None:
    """Each rank's file has its size and its outcome; what is damaged is bad, and no file of it is called good for that
    alone."""
    root = str(tmp_path / "run")
    folder = Path(root, "checkpoint-5")
    folder.mkdir(parents=True)
    for rank in range(3):
        write(root, 1, {f"model.{rank}": [1.0, math.nan if rank == 1 else 2.0]})
        Path(root, name_of(1), "model.safetensors").rename(folder / f"model_rank_{rank}.safetensors")
    Path(root, name_of(1)).rmdir()
    dashboard = open_dashboard(root)
    dashboard.make_passes()
    [one] = dashboard.ask("page", run=root)["generations"]
    found = dashboard.ask("shards", run=root, name=one["name"])
    assert found["outcome"] == "bad"
    files = {f["rank"]: (f["kind"], f["outcome"], bool(f["note"])) for f in found["files"]}
    kind = "model_rank_#.safetensors"
    assert files == {0: (kind, "good", False), 1: (kind, "bad", True), 2: (kind, "good", False)}
    assert found["others"] == []


def test_an_incident_and_its_page(sick: tuple[Dashboard, str]) -> None:
    """The document is that of `ckptguard incident --json`; the page runs no script, whatever the incident says."""
    dashboard, root = sick
    [incident] = dashboard.ask("page", run=root)["incidents"]
    found = dashboard.ask(f"incidents/{incident['name']}", run=root)
    assert (found["id"], found["step"], found["cause"]) == (incident["name"], 3, "numeric")
    assert [t["name"] for t in found["tensors"]] == ["model.w"]
    evil = "<script>alert(1)</script>\u202e"
    made = open_incident(open_run(root), step=9, cause=evil, reason=evil, evidence={evil: evil}, source=evil)
    place = f"/v1/runs/{run_id_of(root)}/incidents/{made.id}"
    status, headers, body = dashboard.get(f"{place}/report")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert headers["content-security-policy"].startswith("default-src 'none'; style-src 'unsafe-inline'")
    assert b"<script" not in body
    assert "\u202e" not in json.dumps(dashboard.ask(f"incidents/{made.id}", run=root), ensure_ascii=False)
    for odd in ("x", "..", "20260101T000000-00000000", "a" * 5000):
        assert dashboard.ask(f"incidents/{odd}", run=root) == (404, "not_found")


@pytest.mark.parametrize("route", ["checkpoint", "shards", "diff"])
def test_a_wrong_name_is_a_sentence(sick: tuple[Dashboard, str], route: str) -> None:
    """No name leads out of the records, and each one that names nothing is refused."""
    dashboard, root = sick
    for odd in (
        "",
        "x",
        "../000000000001.1",
        f"{SERIES}/1.1",
        f"{SERIES}/000000000001.0",
        "a" * 9000,
        "/-.1",
    ):
        query = {"name": odd} if route != "diff" else {"a": name(1), "b": odd}
        assert dashboard.ask(route, run=root, **query) == (400, "settings")
    query = {"name": name(77)} if route != "diff" else {"a": name(1), "b": name(77)}
    assert dashboard.ask(route, run=root, **query) == (404, "not_found")


def test_records_that_cannot_be_read_are_said_so(sick: tuple[Dashboard, str]) -> None:
    """A damaged manifest is a sentence in its own answer, and one column of the heat map."""
    dashboard, root = sick
    manifest = at(root, f"_ckptguard/manifests/{name(2)}.json")
    manifest.write_bytes(manifest.read_bytes()[:100])
    assert dashboard.ask("checkpoint", run=root, name=name(2)) == (503, "records")
    heat = dashboard.ask("heat", run=root)
    assert [bool(c["problem"]) for c in heat["checkpoints"]] == [False, True, False, False]
    assert [row[1] for row in heat["largest"]] == [None] * len(heat["largest"])


def test_a_click_is_bounded(sick: tuple[Dashboard, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """After so many requests, or so long, it says that the storage took too long."""
    dashboard, root = sick
    monkeypatch.setattr(reading, "MOST_REQUESTS", 1)
    assert dashboard.ask("checkpoint", run=root, name=name(1)) == (503, "could_not_tell")


@given(sizes=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), max_size=60))
def test_memory_is_bounded(sizes: list[tuple[int, int]]) -> None:
    """Never more bytes than allowed are remembered, and what is there is what was put last."""
    memory, last = Remembered(100), dict[int, int]()
    for key, size in sizes:
        memory.put(key, size, size)
        last[key] = size
        held = {k: memory.get(k) for k in range(10) if memory.get(k) is not None}
        assert sum(held.values()) <= 100
        assert held.items() <= last.items()


@given(outcomes=st.lists(st.sampled_from(["good"] * 8 + ["bad", "suspect"]), max_size=400), most=st.integers(1, MOST))
def test_a_window_is_even_and_has_the_bad_ones(outcomes: list[str], most: int) -> None:
    """It holds what it may, in order, without gaps larger than need be, and the first bad one with its neighbours."""
    shown = choose(outcomes, most)
    assert shown == sorted(set(shown))
    assert len(shown) == min(len(outcomes), most)
    assert all(0 <= place < len(outcomes) for place in shown)
    bad = [place for place, outcome in enumerate(outcomes) if outcome != Outcome.GOOD]
    if bad and most >= 9:
        assert {p for p in (bad[0] - 1, bad[0], bad[0] + 1) if 0 <= p < len(outcomes)} <= set(shown)
    if not bad and most > 2:
        gaps = [b - a for a, b in pairwise(shown)]
        assert max(gaps, default=0) <= math.ceil(len(outcomes) / (most - 2)) + 1


def test_the_first_bad_cell_is_of_the_model() -> None:
    """Of one checkpoint, a sick model comes before the optimizer that it made sick."""
    assert first_bad([]) is None
    assert first_bad([("optimizer", 0, 4), ("model", 9, 4), ("model", 3, 5)]) == (9, 4)


def test_every_document_is_as_documented(sick: tuple[Dashboard, str]) -> None:
    """Each route answers with the keys and types of its example."""
    dashboard, root = sick
    run = "GET /v1/runs/{run}"
    fleet, page = dashboard.ask("fleet"), dashboard.ask("page", run=root)
    for row in fleet["runs"]:  # maps by outcome, by cause and by label
        row.update(checkpoints={"good": 1}, bytes={"good": 1}, incidents={"numeric": 1}, rollbacks={"numeric": 1})
        row.update(labels={"team": "vision"})
    assert_like(fleet, example("GET /v1/fleet"))
    assert_like({**page, "run": {}, "scrub": None}, example(f"{run}/page"))
    assert_like(dashboard.ask("checkpoint", run=root, name=name(3)), example(f"{run}/checkpoint"))
    heat, shown = dashboard.ask("heat", run=root), example(f"{run}/heat")
    assert [[type(part) for part in cell] for cell in heat.pop("bad")] == [
        [type(part) for part in cell] for cell in shown.pop("bad")
    ]
    assert_like(heat, shown)
    assert_like(dashboard.ask("shards", run=root, name=name(1)), example(f"{run}/shards"))
    found = dashboard.ask("diff", run=root, a=name(1), b=name(2))
    for change in found["changes"]:
        change.update(a={}, b={})
    assert_like(found, example(f"{run}/diff"))


def test_the_preview_of_retention_is_that_of_the_run_as_it_is_now(sick: tuple[Dashboard, str]) -> None:
    """It uses what the last pass read in the names. After each kind of change, also one that no pass has seen, it says
    what a look that knows nothing finds."""
    dashboard, root = sick

    def mark(step: int) -> None:
        view = look(root, TINY)
        [id] = [id for id in view.history.current_verdicts(SERIES) if id.number == step]
        mark_suspect(view, id, "the loss jumped")

    def use(step: int) -> None:
        view = look(root, TINY)
        pin(view, view.listing.checkpoints[name_of(step)])

    changes: list[Callable[[], object]] = [
        lambda: None,
        lambda: write(root, 5, {"w": [1.0]}),
        lambda: shutil.rmtree(Path(root, name_of(2))),
        lambda: write(root, 1, {"w": [2.0]}),
        lambda: mark(4),
        lambda: use(1),
        lambda: (Path(root) / "latest").symlink_to(name_of(1)),
    ]
    seen = []
    for change in changes:
        for passes in (0, 1):
            change() if not passes else dashboard.make_passes()
            found = dashboard.ask("retention", run=root, keep_last=1, failed="true")
            alone = fields(verbs.dry_prune(look(root, TINY), verbs.Rules(keep_last=1, failed=True)))
            assert {key: found[key] for key in alone} == json.loads(json.dumps(alone))
            seen.append(json.dumps(found))
    assert len(set(seen)) >= len(changes)
