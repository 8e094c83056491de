"""Records that rotted, or that somebody else wrote: no answer of theirs is believed, nothing leaves the run."""

import json
import zlib

import msgspec
import pytest
from support.faults import flip
from support.records_on_disk import at
from support.runs import QUICK, write_torch
from support.views import entry_name, look

from ckptguard.errors import CouldNotTellError, NoKnownGoodError, RecordsError
from ckptguard.inspect.list_states import survey
from ckptguard.records.run import open_run
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.ids import CheckpointId
from ckptguard.values.manifest import Counter, decode_manifest
from ckptguard.values.verdict import Outcome
from ckptguard.verification.target import verify_target

SERIES = "net-#.pt"


def records(root, folder):
    """A folder of the records of the one series."""
    return at(root, f"_ckptguard/{folder}/{SERIES}")


@pytest.mark.parametrize("folder", ["ledger", "manifests", "kept"])
@pytest.mark.parametrize("offset", [3, 40, -4])
def test_a_flipped_bit_in_one_record_never_takes_the_run_down(root, three, folder, offset):
    """Every other checkpoint is still known, verified and kept."""
    reconcile(look(three), PassNotes())
    [path] = [p for p in records(root, folder).iterdir() if p.name.startswith("000000000300.1.")]
    flip(path, offset, 0x80)
    write_torch(root, 400, seed=4)
    done = reconcile(look(three), PassNotes())
    assert [c.step for c in done.checked if c.step == 400] == [400]
    assert str(find_known_good(three).id) == "400.1"
    assert {s.path for s in survey(look(three)) if s.in_place} >= {
        "net-100.pt",
        "net-200.pt",
        "net-300.pt",
        "net-400.pt",
    }


def test_a_damaged_manifest_is_no_licence_for_the_bytes(root, three):
    """Bytes that cannot be compared are pending, never a new generation."""
    reconcile(look(three), PassNotes())
    (records(root, "manifests") / "000000000300.1.json").write_text('{"format": 1}')
    with open(root / "net-300.pt", "r+b") as file:
        file.seek(20000)
        file.write(b"\x00\x01\x02\x03")
    report = verify_target(str(root), QUICK)
    found = {c.step: c.outcome for c in report.checkpoints}
    assert found == {100: Outcome.GOOD, 200: Outcome.GOOD, 300: Outcome.PENDING}
    assert report.could_not_tell
    assert str(find_known_good(three).id) == "200.1"


def test_a_manifest_of_another_checkpoint_is_refused(root, three):
    """A record that speaks of something else than its name is damaged."""
    reconcile(look(three), PassNotes())
    folder = records(root, "manifests")
    (folder / "000000000300.1.json").write_bytes((folder / "000000000200.1.json").read_bytes())
    assert str(find_known_good(three).id) == "200.1"


@pytest.mark.parametrize(
    "change",
    [
        {"path": "../../../../etc/passwd"},
        {"series": ".."},
        {"step": 7},
        {"files": ["../../x"]},
        {"path": "/etc/passwd"},
    ],
)
def test_a_kept_mark_cannot_lead_anywhere(root, three, change):
    """A mark with foreign paths or names is none; the run is looked after as ever."""
    reconcile(look(three), PassNotes())
    mark = records(root, "kept") / "000000000300.1.json"
    mark.write_text(json.dumps(json.loads(mark.read_text()) | change))
    (root / "net-300.pt").unlink()
    assert str(find_known_good(three).id) == "200.1"
    reconcile(look(three), PassNotes())


@pytest.mark.parametrize("path", ["../victim", "_ckptguard", "/etc", "net-300.pt\0"])
def test_a_quarantine_mark_moves_nothing_foreign(root, three, tmp_path, path):
    """A forged mark neither moves files outside nor stops the pass."""
    (tmp_path / "victim").write_text("mine")
    reconcile(look(three), PassNotes())
    folder = at(root, f"_ckptguard/quarantine/{SERIES}")
    folder.mkdir(parents=True)
    info = (tmp_path / "victim").stat()
    forged = {
        "series": SERIES,
        "step": 300,
        "generation": 9,
        "path": path,
        "files": [path],
        "signature": [[path, info.st_size, info.st_mtime_ns, info.st_ino, None]],
        "reason": "",
        "moved_at": "",
    }
    (folder / "000000000300.9.json").write_text(json.dumps(forged))
    reconcile(look(three), PassNotes())
    assert (tmp_path / "victim").read_text() == "mine"
    assert (root / "net-300.pt").exists()


@pytest.mark.parametrize("field", ["size", "mtime_ns", "inode", "counter"])
def test_a_manifest_with_a_number_beyond_measure_is_damaged(root, three, field):
    """No number on record is one that cannot be told on."""
    reconcile(look(three), PassNotes())
    path = records(root, "manifests") / "000000000300.1.json"
    manifest = decode_manifest(path.read_bytes())
    huge = 10**24
    if field == "counter":
        forged = msgspec.structs.replace(manifest, counters=(Counter("epoch", huge, "net"),))
    else:
        files = (msgspec.structs.replace(manifest.files[0], **{field: huge}), *manifest.files[1:])
        forged = msgspec.structs.replace(manifest, files=files)
    line = json.dumps(msgspec.to_builtins(forged)).encode() + b"\n"
    path.write_bytes(line + b"crc32 %08x\n" % zlib.crc32(line))
    with pytest.raises(RecordsError, match="too large"):
        decode_manifest(path.read_bytes())
    assert str(find_known_good(three).id) == "200.1"


def test_records_are_not_written_through_a_link(root, tmp_path):
    """A downloaded run whose _ckptguard is a link is refused, and nothing is written where it leads."""
    write_torch(root, 100, seed=1)
    (tmp_path / "elsewhere").mkdir()
    (root / "_ckptguard").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RecordsError, match="link"):
        open_run(str(root))
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_an_empty_worse_entry_neither_counts_nor_stays_in_the_way(root, three):
    """GOOD, then a torn BAD: still known-good, and a re-check sets the ledger right."""
    reconcile(look(three), PassNotes())
    (records(root, "ledger") / entry_name(300, 1, 2, Outcome.BAD)).write_bytes(b"")
    assert str(find_known_good(three).id) == "300.1"
    (records(root, "ledger") / entry_name(300, 1, 3, Outcome.BAD)).write_bytes(b"torn")
    verify_target(str(root), QUICK)
    assert str(find_known_good(three).id) == "300.1"


def test_an_empty_better_entry_lifts_nothing(root, three):
    """SUSPECT, then a torn GOOD: still suspect."""
    from ckptguard.errors import RefusedError
    from ckptguard.keep.quarantine import mark_suspect
    from ckptguard.recover.restore import restore

    reconcile(look(three), PassNotes())
    mark_suspect(look(three), CheckpointId(SERIES, 300, 1), "sick soon after")
    for number, content in ((3, b""), (4, b"torn")):
        (records(root, "ledger") / entry_name(300, 1, number, Outcome.GOOD)).write_bytes(content)
        assert str(find_known_good(three).id) == "200.1"
        with pytest.raises(RefusedError):
            restore(look(three), str(root.parent / "out"), step=300)


def test_a_newer_format_of_one_record_is_could_not_tell():
    """RecordsError is one of those that say nothing about a checkpoint."""
    assert issubclass(RecordsError, CouldNotTellError)
    assert not issubclass(NoKnownGoodError, CouldNotTellError)
