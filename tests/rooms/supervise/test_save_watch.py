"""What supervise does about saves after the command died."""

import pytest
from support.runs import QUICK, write_torch

from ckptguard.errors import WorkerError
from ckptguard.scan import scan_files
from ckptguard.supervise.save_watch import SaveWatch


def unreadable(storage, keys, options, progress):
    """A scanner whose process is always killed."""
    raise WorkerError("the scanning process was killed")


@pytest.mark.parametrize("readable", [True, False])
def test_after_a_crash_only_what_is_of_no_use_is_moved_aside(readable, tmp_path):
    """Half-written saves are; whole ones of which nothing could be told stay."""
    scanner = scan_files if readable else unreadable
    watch = SaveWatch(str(tmp_path), QUICK, scanner, tell=lambda said: None, event=lambda event: None)
    watch.prepare()
    watch.begin()
    for step in (10, 20):
        write_torch(tmp_path, step, seed=step)
    cut = (tmp_path / "net-20.pt").read_bytes()
    for step in (10, 20):
        (tmp_path / f"net-{step}.pt").write_bytes(cut[: len(cut) // 2])
    went = watch.go_back([], "the command ended with exit code 1")
    assert list(went.quarantined) == (["net-10.pt", "net-20.pt"] if readable else [])
    assert sorted(p.name for p in tmp_path.glob("*.pt")) == ([] if readable else ["net-10.pt", "net-20.pt"])
