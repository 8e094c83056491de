"""verify on Hugging Face hub caches: what is named, what it is called, and the exit codes."""

from __future__ import annotations

import os
import sys

import pytest
from support.faults import flip
from support.hub_caches import COMMIT, LATER, Hub, git_sha1, sharded_files

from ckptguard.runs.work import Work
from ckptguard.terminal.output import bytes_below
from ckptguard.values.settings import Settings
from ckptguard.verification.target import verify_target

SHARD = "model-00002-of-00003.safetensors"
REPOSITORY = "models--org--tiny"


@pytest.fixture
def hub(root):
    """A hub folder with nothing in it."""
    return Hub(root / "hub")


@pytest.fixture
def snapshot(hub):
    """A repository with one finished download."""
    return hub.download(sharded_files())


def heavy(found):
    """(check, file) of the errors in a document with one checkpoint."""
    [checkpoint] = found["checkpoints"]
    return {(f["check"], f["file"]) for f in checkpoint["findings"] if f["severity"] == "error"}


def listing(folder):
    """Everything below a folder, with what would change if it were written to."""
    return sorted((str(p), p.lstat().st_mtime_ns, p.lstat().st_size) for p in folder.rglob("*"))


def test_the_fixture_is_a_cache_to_hugging_face_too(hub, snapshot):
    """huggingface_hub reads our caches without a complaint, with shared bytes and without links too."""
    scan_cache_dir = pytest.importorskip("huggingface_hub").scan_cache_dir
    hub.share(snapshot / SHARD)
    hub.download({"data/train.parquet": b"rows"}, repository="datasets--org--data")
    hub.download(sharded_files(2), repository="models--copied", links=False)
    found = scan_cache_dir(hub.folder)
    assert found.warnings == []
    assert {r.repo_id for r in found.repos} == {"org/tiny", "org/data", "copied"}
    assert {r.commit_hash for repo in found.repos for r in repo.revisions} == {COMMIT}


def test_every_way_to_name_a_good_cache(document, hub, snapshot):
    """Hub, repository, snapshot, file, blob, and links to them: all good, and nothing is written anywhere."""
    before = listing(hub.folder)
    alias = hub.folder.parent / "alias"
    alias.symlink_to(snapshot)
    at_file = hub.folder.parent / "weights.safetensors"
    at_file.symlink_to(snapshot / SHARD)
    whole, one = f"snapshots/{COMMIT}", COMMIT
    for target, kind, path in (
        (hub.folder, "run", f"{REPOSITORY}/{whole}"),
        (hub.repository(), "run", whole),
        (hub.repository() / "snapshots", "run", whole),
        (snapshot, "checkpoint", one),
        (alias, "checkpoint", one),
        (snapshot / "onnx", "checkpoint", "onnx"),
        (snapshot / SHARD, "file", SHARD),
        (alias / SHARD, "file", SHARD),
        (at_file, "file", SHARD),
        (snapshot / "onnx" / "config.json", "file", "config.json"),
        ((snapshot / SHARD).resolve(), "file", SHARD),
    ):
        code, found = document("verify", target)
        assert (found["kind"], [c["path"] for c in found["checkpoints"]]) == (kind, [path])
        if path != "onnx":  # a folder of a model without weights of its own
            assert (code, found["outcome"]) == (0, "good"), target
    assert listing(hub.folder) == before


@pytest.mark.parametrize("name", [SHARD, "config.json", "onnx/config.json", "model.safetensors.index.json"])
def test_bytes_that_are_not_those_of_the_blobs_name_are_bad(document, hub, snapshot, name):
    """One bit anywhere, in a large file or a small one: bad, the snapshot's file is named, and no other."""
    flip((snapshot / name).resolve(), -3, 4)
    code, found = document("verify", hub.repository())
    assert (code, found["outcome"]) == (3, "bad")
    assert ("digests", f"snapshots/{COMMIT}/{name}") in heavy(found)
    assert {file for _, file in heavy(found)} == {f"snapshots/{COMMIT}/{name}"}
    assert document("verify", snapshot / name)[0] == 3
    assert document("verify", (snapshot / name).resolve())[0] == 3
    assert document("verify", snapshot / "model-00001-of-00003.safetensors")[0] == 0


def test_swapped_and_truncated_blobs_are_bad(document, snapshot):
    """Two blobs under each other's names, and one that ends early."""
    first, second = (snapshot / "model-00001-of-00003.safetensors").resolve(), (snapshot / SHARD).resolve()
    first_bytes, second_bytes = first.read_bytes(), second.read_bytes()
    first.write_bytes(second_bytes)
    second.write_bytes(first_bytes)
    code, found = document("verify", snapshot)
    assert code == 3
    assert {f for c, f in heavy(found) if c == "digests"} == {first_name(snapshot, first), first_name(snapshot, second)}
    first.write_bytes(first_bytes)
    second.write_bytes(second_bytes[:-100])
    code, found = document("verify", snapshot)
    assert code == 3
    assert ("digests", SHARD) in heavy(found)
    assert ("structure", SHARD) in heavy(found)


def first_name(snapshot, blob):
    """The name in a snapshot whose link leads to a blob."""
    return next(p.name for p in sorted(snapshot.iterdir()) if p.resolve() == blob)


def test_shared_bytes_are_verified_where_they_lie(document, hub, snapshot):
    """huggingface_hub 2 keeps bytes once for several repositories."""
    place = hub.share(snapshot / SHARD)
    assert document("verify", hub.folder)[0] == 0
    assert document("verify", snapshot / SHARD)[0] == 0
    flip(place)
    code, found = document("verify", hub.folder)
    assert code == 3
    assert heavy(found) == {("digests", f"{REPOSITORY}/snapshots/{COMMIT}/{SHARD}")}


def test_a_missing_blob_is_incomplete(document, invoke, hub, snapshot):
    """A link without its blob: what the index lists is not there."""
    (snapshot / SHARD).resolve().unlink()
    code, found = document("verify", snapshot)
    assert (code, found["outcome"]) == (4, "incomplete")
    assert {check for check, _ in heavy(found)} == {"completeness"}
    assert {file for _, file in heavy(found)} == {SHARD}
    assert "blob is missing" in invoke("verify", snapshot).stdout
    assert document("verify", snapshot / SHARD)[1]["outcome"] == "incomplete"
    (snapshot / SHARD).unlink()
    assert document("verify", hub.repository())[1]["outcome"] == "incomplete"
    other = hub.download(sharded_files(), repository="models--other")
    (other / "config.json").resolve().unlink()  # no index lists it, but the snapshot does
    code, found = document("verify", other)
    assert (code, heavy(found)) == (4, {("completeness", "config.json")})


@pytest.mark.parametrize("ending", [".incomplete", ".0a1b2c3d.incomplete"])
def test_a_download_that_did_not_end_is_incomplete(document, hub, snapshot, ending):
    """Until its blob is there; the snapshot that main names is the one concerned, an older one is not."""
    older = hub.download(sharded_files(2), commit=LATER, ref=None)
    data = b"a large file"
    name = git_sha1(data)
    part = hub.repository() / "blobs" / (name + ending)
    part.write_bytes(data[:4])
    code, found = document("verify", snapshot)
    assert (code, found["outcome"]) == (4, "incomplete")
    [(check, file)] = heavy(found)
    assert (check, file.endswith(name + ending)) == ("completeness", True)
    assert document("verify", older)[0] == 0
    assert document("verify", part)[0] == 4
    (hub.repository() / "blobs" / name).write_bytes(data)
    assert document("verify", snapshot)[0] == 0


def test_a_download_that_has_just_begun(document, invoke, hub):
    """A repository with parts alone is incomplete; one about which the hub was only asked is nothing."""
    root = hub.repository()
    (root / "blobs").mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(COMMIT)
    assert invoke("verify", root).exit_code == 10
    (root / "blobs" / ("0" * 64 + ".incomplete")).write_bytes(b"1")
    code, found = document("verify", root)
    assert (code, found["outcome"]) == (4, "incomplete")
    hub.download(sharded_files(), repository="models--other")
    code, found = document("verify", hub.folder)
    assert (code, [c["outcome"] for c in found["checkpoints"]]) == (4, ["incomplete", "good"])


def test_a_ref_without_its_snapshot_is_a_warning(document, hub, snapshot):
    """What is there is good; that the ref leads nowhere is said."""
    (hub.repository() / "refs" / "pr").mkdir()
    (hub.repository() / "refs" / "pr" / "1").write_text(LATER + "\n")
    code, found = document("verify", hub.repository())
    assert code == 0
    warnings = [f for f in found["checkpoints"][0]["findings"] if f["severity"] == "warning"]
    assert [(f["check"], f["file"]) for f in warnings] == [("completeness", "refs/pr/1")]
    assert LATER in warnings[0]["message"]


def test_a_snapshot_without_links_is_judged_by_what_is_in_it(document, hub):
    """Where links cannot be made there are no digests: structure and index count, and a notice says so."""
    snapshot = hub.download(sharded_files(), links=False)
    code, found = document("verify", hub.repository())
    assert code == 0
    [notice] = [f for f in found["checkpoints"][0]["findings"] if f["check"] == "digests"]
    assert notice["severity"] == "notice"
    (snapshot / SHARD).write_bytes((snapshot / SHARD).read_bytes()[:-50])
    code, found = document("verify", hub.repository())
    assert (code, heavy(found)) == (3, {("structure", f"snapshots/{COMMIT}/{SHARD}")})


def test_blobs_of_a_mirror_are_judged_by_what_is_in_them(document, hub, snapshot):
    """A blob that is named by neither digest states none."""
    blob = (snapshot / SHARD).resolve()
    named = blob.rename(blob.with_name("etag-of-a-mirror"))
    (snapshot / SHARD).unlink()
    (snapshot / SHARD).symlink_to(os.path.relpath(named, snapshot))
    code, found = document("verify", snapshot)
    assert code == 0
    assert [f["file"] for f in found["checkpoints"][0]["findings"] if f["check"] == "digests"] == [SHARD]


def test_what_is_no_model_needs_no_weights(document, hub):
    """Data sets and spaces are compared with their blobs' names; a model without weights is incomplete."""
    files = {"data/train.parquet": b"rows", "README.md": b"# data"}
    data = hub.download(files, repository="datasets--org--data")
    assert document("verify", hub.folder)[0] == 0
    flip((data / "data" / "train.parquet").resolve())
    code, found = document("verify", hub.folder)
    assert (code, {f for _, f in heavy(found)}) == (3, {f"datasets--org--data/snapshots/{COMMIT}/data/train.parquet"})
    tokenizer = hub.download({"tokenizer.json": b"{}"}, repository="models--org--tokenizer")
    assert document("verify", tokenizer)[1]["outcome"] == "incomplete"
    quantised = hub.download({"model-Q4.gguf": b"GGUF" + bytes(100)}, repository="models--org--gguf")
    assert document("verify", quantised)[1]["outcome"] == "good"


@pytest.mark.parametrize("name", [SHARD, "config.json"])
@pytest.mark.parametrize("target", ["/etc/hostname", "../../../../canary", "../../blobs/../refs/main", "itself", "."])
def test_links_that_lead_elsewhere_are_bad_and_not_followed(document, root, snapshot, name, target):
    """Whatever the file is for, and by whatever way it is named: nothing outside is opened."""
    (root / "canary").write_bytes(b"secret")
    (snapshot / name).unlink()
    (snapshot / name).symlink_to(name if target == "itself" else target)
    opened, watching = [], [True]

    def watch(event, arguments):
        if watching and event == "open":
            opened.append(str(arguments[0]))

    sys.addaudithook(watch)
    try:
        code, found = document("verify", snapshot)
        by_itself = document("verify", snapshot / name)[1] if target not in ("itself", ".") else None
    finally:
        watching.clear()
    assert (code, found["outcome"]) == (3, "bad")
    assert ("structure", name) in heavy(found)
    assert by_itself is None or by_itself["outcome"] == "bad"
    assert not [path for path in opened if path.endswith(("canary", "hostname"))]


@pytest.mark.parametrize("kind", ["fifo", "link", "folder"])
def test_a_blob_that_is_no_file_is_bad(document, root, snapshot, kind):
    """Nothing waits for a FIFO, and a blob that is a link is not followed. Nor is a FIFO a part of a snapshot."""
    blob = (snapshot / SHARD).resolve()
    blob.unlink()
    (root / "canary").write_bytes(b"secret")
    {"fifo": os.mkfifo, "link": lambda b: b.symlink_to(root / "canary"), "folder": os.mkdir}[kind](blob)
    code, found = document("verify", snapshot)
    assert (code, ("structure", SHARD) in heavy(found)) == (3, True)
    os.mkfifo(snapshot / "pipe")
    assert ("structure", "pipe") in heavy(document("verify", snapshot)[1])


def test_a_repository_behind_a_link_is_named(invoke, hub, snapshot, tmp_path):
    """In a whole hub it is not followed, and that could not be told; by its own name it is."""
    other = Hub(tmp_path / "disk")
    other.download(sharded_files(2), repository="models--moved")
    (hub.folder / "models--moved").symlink_to(other.repository("models--moved"))
    result = invoke("verify", hub.folder)
    assert result.exit_code == 1
    assert "models--moved is a link" in result.stderr
    assert invoke("verify", hub.folder / "models--moved").exit_code == 0


def test_a_cache_inside_a_run_is_not_its_own(document, three):
    """A run whose trainer keeps its downloads beside its saves."""
    Hub(three / "cache").download(sharded_files())
    code, found = document("verify", three)
    assert code == 0
    assert [c["path"] for c in found["checkpoints"]] == [f"net-{step}.pt" for step in (100, 200, 300)]


@pytest.mark.parametrize(
    ("path", "options", "code"),
    [
        (f"snapshots/{LATER}", (), 10),
        (f"snapshots/{COMMIT}/absent.bin", (), 10),
        ("blobs/absent", (), 10),
        ("..", ("--step", 1), 2),
        ("..", ("--newest", 1), 2),
    ],
)
def test_what_cannot_be_asked_of_a_cache_is_a_sentence(invoke, hub, snapshot, path, options, code):
    """Snapshots, files and blobs that it does not have; steps, which mean nothing there."""
    result = invoke("verify", hub.repository() / path, *options)
    assert (result.exit_code, result.stderr.startswith("error: ")) == (code, True)


def test_a_checksum_file_goes_with_a_snapshot(document, invoke, hub, snapshot):
    """Its paths are relative to the snapshot that it lies in, by a link as everything there."""
    import hashlib

    lines = [f"{hashlib.md5(p.read_bytes()).hexdigest()}  {p.name}\n" for p in snapshot.glob("*.safetensors")]
    hub.download({"MD5SUMS": "".join(lines).encode()})
    assert document("verify", snapshot, "--check-sums", snapshot / "MD5SUMS")[0] == 0
    assert document("verify", hub.repository(), "--check-sums", snapshot / "MD5SUMS")[0] == 0
    sums = hub.folder.parent / "SUMS"
    sums.write_text("0" * 32 + f"  {SHARD}\n")
    code, found = document("verify", snapshot, "--check-sums", sums)
    assert (code, heavy(found)) == (3, {("digests", SHARD)})
    hub.download(sharded_files(2), repository="models--other")
    assert invoke("verify", hub.folder, "--check-sums", sums).exit_code == 2


def test_blobs_that_snapshots_share_are_read_once(tmp_path, monkeypatch):
    """A second snapshot reads what is its own; what it shares is judged all the same, and the bar knows the total."""
    hub = Hub(tmp_path / "hub")
    files = sharded_files()
    hub.download(files)
    hub.download({**files, "config.json": b'{"hidden_size": 49}'}, commit=LATER, ref="later")
    repository = hub.repository()
    held = sum(p.stat().st_size for p in (repository / "blobs").iterdir())
    read = []
    report = verify_target(str(repository), Settings(settle=0.0), work=Work(progress=read.append))
    assert [c.outcome.value for c in report.checkpoints] == ["good", "good"]
    assert sum(read) == held
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert bytes_below(str(repository / "snapshots")) == held
    flip(next((repository / "snapshots" / COMMIT).glob("*-00002-*")).resolve())
    report = verify_target(str(repository), Settings(settle=0.0))
    assert [c.outcome.value for c in report.checkpoints] == ["bad", "bad"]
    assert all(f.file.startswith(c.path) for c in report.checkpoints for f in c.findings if f.file)
