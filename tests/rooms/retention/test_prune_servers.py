"""Pruning on real servers (all of them with CKPTGUARD_CAMPAIGN=full): what a listing and a look at one object say must
agree, or nothing would ever be removed."""

import os
import uuid

import pytest
from servers.fixtures import AZURE_CONTAINER, GCS_BUCKET, S3_BUCKETS, served
from support.runs import write_sharded
from support.views import look

from ckptguard.records.run import open_run
from ckptguard.records.trash import list_trashed
from ckptguard.recover.restore import restore
from ckptguard.retention.prune import prune
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.storage import open_storage
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.retention_policy import Policy
from ckptguard.values.verdict import Outcome

LAST = Policy(keep_last=1, keep_good=1)


SERVERS = (
    ["moto", "ceph", "sftp", "azure", "gcs"] if os.environ.get("CKPTGUARD_CAMPAIGN") == "full" else ["ceph", "sftp"]
)


@pytest.fixture(params=SERVERS)
def url(request, tmp_path):
    """A new place on a server."""
    server = request.getfixturevalue(request.param)
    name = f"prune-{uuid.uuid4().hex[:8]}"
    if request.param == "sftp":
        return f"sftp://127.0.0.1:{server.port}{tmp_path}/{name}"
    bucket = {
        "moto": f"s3://{S3_BUCKETS[0]}",
        "ceph": f"s3://{S3_BUCKETS[1]}",
        "azure": f"abfs://{AZURE_CONTAINER}",
        "gcs": f"gs://{GCS_BUCKET}",
    }[request.param]
    return f"{bucket}/{name}"


@pytest.mark.campaign
def test_what_is_not_kept_goes_after_its_time_of_grace(url, tmp_path):
    """Marked, still restorable, then gone with its folder; what is kept is verified all the time."""
    made = tmp_path / "made"
    made.mkdir()
    storage = open_storage(url, must_exist=False, options=served().storage)
    for step in (100, 200):
        folder = made / write_sharded(made, step, seed=step)
        for file in folder.iterdir():
            storage.create(f"{folder.name}/{file.name}", file.read_bytes())
    run = open_run(url, served())
    done = reconcile(look(run), PassNotes(), assume_quiet=True)
    assert [c.outcome for c in done.checked] == [Outcome.GOOD] * 2
    assert not reconcile(look(run), PassNotes(), assume_quiet=True).checked
    pruned = prune(look(run), LAST, grace=86400.0)
    assert (pruned.could_not_tell, [d.checkpoint.id.step for d in pruned.removed]) == ((), [100])
    assert [m.how for m in pruned.in_trash] == ["marked"]
    assert restore(look(run), str(tmp_path / "out"), step=100).outcome is Outcome.GOOD
    emptied = prune(look(run), LAST, grace=0.0)
    assert (emptied.could_not_tell, [m.step for m in emptied.emptied]) == ((), [100])
    left = {e.key.split("/")[0] for e in run.storage.list("", recursive=True)}
    assert left == {"sharded-200", "_ckptguard"}
    assert {e.key for e in run.storage.list("") if e.kind == "folder"} == {"sharded-200", "_ckptguard"}
    assert list_trashed(run) == []
    assert find_known_good(run).step == 200
