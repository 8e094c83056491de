"""A run behind a URL is a run like any other: saved, verified, gone back to and resumed without a copy here."""

import os
import signal
import sys
import threading
import uuid

import pytest
import torch
from servers.fixtures import AZURE_CONTAINER, GCS_BUCKET, S3_BUCKETS, served
from support.forked import Forked
from support.guards import guard_of as local_guard_of
from support.runs import QUICK
from support.tiny_training import Training

import ckptguard
from ckptguard.errors import BusyError, NoKnownGoodError, SettingsError, StorageFullError
from ckptguard.records.leases import CLAIMS, claim_path, list_claims
from ckptguard.records.run import list_records, open_run
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.storage.remote import multipart
from ckptguard.storage.remote.remote_storage import RemoteReader
from ckptguard.storage.remote.upload import SMALLEST_PART, RemoteUpload
from ckptguard.training.saving import destinations
from ckptguard.training.saving.destinations import local_root
from ckptguard.values.verdict import Outcome
from ckptguard.verification.target import verify_target


@pytest.fixture(params=["memory", "s3"])
def url(request):
    """A place for one run."""
    name = f"run-{uuid.uuid4().hex[:12]}"
    if request.param == "memory":
        return f"memory://{name}"
    return s3_url(request)


@pytest.fixture
def store(request):
    """A place on an S3 server."""
    return s3_url(request)


def s3_url(request):
    """A new run in moto's bucket."""
    request.getfixturevalue("moto")
    return f"s3://{S3_BUCKETS[0]}/run-{uuid.uuid4().hex[:12]}"


def guard_of(url, model=None, **options):
    """A guard whose settings name the servers."""
    return local_guard_of(url, model, **({"settings": served(QUICK)} | options))


def train(url, training, total, *, poison_at=None, **options):
    """Updates up to `total`; one of them has a poisoned gradient norm."""
    with ckptguard.TrainingGuard(url, **training.parts(), daemon="off", settings=served(QUICK), **options) as guard:
        for step, batch in guard.steps(training.loader, total=total, save_every=3):
            loss, norm = training.update(step, batch)
            if step == poison_at:
                training.model[0].weight.data[0, 0] = float("nan")
                norm, poison_at = torch.tensor(float("nan")), None
            guard.observe(loss=loss, grad_norm=norm)
        return guard.step


def stored(url):
    """Keys in the run, without records."""
    return sorted(
        e.key for e in open_run(url, served()).storage.list("", recursive=True) if not e.key.startswith("_ckptguard")
    )


def test_training_is_saved_gone_back_to_and_resumed_as_on_a_disk(url, tmp_path):
    """The same losses as with a local run, over an incident and an interruption."""
    losses = []
    for place in (tmp_path / "run", url):
        training = Training()
        assert train(place, training, 6, poison_at=5, saving=ckptguard.Saving(blocking=False)) == 6
        resumed = Training(seed=99)
        train(place, resumed, 8)
        losses.append(training.losses | resumed.losses)
    assert losses[0] == losses[1]
    report = verify_target(url, served(QUICK))
    assert report.outcome is Outcome.GOOD
    assert {c.digest_origin for c in report.checkpoints} == {"writer"}
    assert list_records(open_run(url, served()), CLAIMS) == []
    assert stored(url) == stored(tmp_path / "run")


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")  # gcsfs, of its own uploads
@pytest.mark.parametrize("kind", ["sftp", "ceph", "azure", "gcs"])
def test_every_kind_of_server_takes_saves_and_gives_them_back(request, kind):
    """In parts too; the same step again, the verdict and the way back."""
    server = request.getfixturevalue(kind)
    name = f"run-{uuid.uuid4().hex[:12]}"
    url = {
        "sftp": lambda: server.url(server.folder / name),
        "ceph": lambda: f"s3://{S3_BUCKETS[1]}/{name}",
        "azure": lambda: f"abfs://{AZURE_CONTAINER}/{name}",
        "gcs": lambda: f"gs://{GCS_BUCKET}/{name}",
    }[kind]()
    model = torch.nn.Linear(2048, 1100)
    guard = guard_of(url, model)
    guard.save(step=1)
    torch.nn.init.ones_(model.weight)
    guard.save(step=1)
    assert verify_target(url, served(QUICK)).outcome is Outcome.GOOD
    torch.nn.init.zeros_(model.weight)
    assert guard.resume() == 1
    assert bool((model.weight == 1).all())
    assert list_claims(open_run(url, served())) == []


def test_a_large_file_goes_up_in_parts_and_little_of_it_is_held(store, monkeypatch):
    """Parts are sent side by side, and as many bytes as four parts of each file are under way at most."""
    lock, held, most, sent = threading.Lock(), 0, 0, []
    real = multipart.S3Parts.put

    def put(self, number, data):
        nonlocal held, most
        with lock:
            held += len(data)
            most = max(most, held)
            sent.append(len(data))
        real(self, number, data)
        with lock:
            held -= len(data)

    monkeypatch.setattr(multipart.S3Parts, "put", put)
    model = torch.nn.Linear(4096, 3000)
    guard = guard_of(store, model)
    path = guard.save(step=5)
    assert path == f"{store}/step-000000005"
    assert len(sent) == 6
    assert max(sent) == SMALLEST_PART
    assert most <= 4 * SMALLEST_PART
    want = model.weight.detach().clone()
    torch.nn.init.zeros_(model.weight)
    assert guard.resume() == 5
    assert torch.equal(model.weight, want)


def test_what_was_damaged_there_is_never_loaded(url):
    """A byte that changed on the store is found on the way in, and an older checkpoint is taken."""
    model = torch.nn.Linear(200, 50)
    guard = guard_of(url, model)
    guard.save(step=1)
    want = model.weight.detach().clone()
    guard.save(step=2)
    verify_target(url, served(QUICK))
    storage = open_run(url, served()).storage
    with storage.open("step-000000002/model.safetensors") as reader:
        data = bytearray(reader.read(0, reader.entry.size))
    data[-1] ^= 1
    with storage.upload("step-000000002/model.safetensors", replace=True) as upload:
        upload.write(data)
        upload.commit()
    torch.nn.init.zeros_(model.weight)
    assert guard.resume() in (1, 2)  # 2 by its kept copy
    assert torch.equal(model.weight, want)


def test_only_bytes_that_were_read_back_make_it_good(url, monkeypatch):
    """The writer's digests alone are no verdict, and the verdict comes from reading all of it, where it lies."""
    guard = guard_of(url)
    guard.save(step=1)
    with pytest.raises(NoKnownGoodError):
        find_known_good(open_run(url, served()))
    read, real = [], RemoteReader.read

    def count(self, offset, length):
        read.append((self.entry.key, length))
        return real(self, offset, length)

    monkeypatch.setattr(RemoteReader, "read", count)
    verify_target(url, served(QUICK))
    assert find_known_good(open_run(url, served())).step == 1
    for key in stored(url):
        size = open_run(url, served()).storage.stat(key).size
        assert sum(length for name, length in read if name == key) >= size


def test_a_save_that_fails_leaves_nothing(url, monkeypatch):
    """The storage is full at the commit of the second file: nothing of the step is left, and the good one restores."""
    guard = guard_of(url)
    guard.save(step=10)
    before, real = stored(url), RemoteUpload.commit

    def commit(self):
        if self._key.endswith("state.json"):
            raise StorageFullError("no space left", key=self._key)
        real(self)

    with monkeypatch.context() as patched:
        patched.setattr(RemoteUpload, "commit", commit)
        with pytest.raises(StorageFullError):
            guard.save(step=20)
    assert stored(url) == before
    assert list_claims(open_run(url, served())) == []
    assert guard.resume() == 10
    guard.save(step=20)
    assert guard.resume() == 20


def test_of_two_writers_of_a_step_one_is_told_of_the_other(url):
    """While another process writes the step, a save of it names that process and touches nothing."""
    guard = guard_of(url)
    run = open_run(url, served())
    claim_path(run, path="step-000000007", series="step-#", step=7, generation=1)
    with pytest.raises(BusyError, match=f"process {os.getpid()} on "):
        guard.save(step=7)
    assert stored(url) == []
    guard.save(step=8)
    assert guard.resume() == 8


def test_a_save_that_was_given_up_gives_way_and_never_counts(url, monkeypatch):
    """The step is saved again while the one that was given up still hangs; only the second is ever sealed."""
    hangs, go_on = threading.Event(), threading.Event()
    real = destinations.as_stored

    def as_stored(run, file):
        if not hangs.is_set():
            hangs.set()
            assert go_on.wait(100)
        return real(run, file)

    monkeypatch.setattr(destinations, "as_stored", as_stored)
    guard = guard_of(url, deadlines=ckptguard.Deadlines(daemon=0.01))
    guard.save(step=3, blocking=False)
    assert hangs.wait(100)
    first = guard._saving._in_flight
    guard._saving.drain(0.01)
    guard.save(step=3)
    go_on.set()
    assert first.wait(100)
    assert stored(url) == ["step-000000003/model.safetensors", "step-000000003/state.json"]
    assert guard.resume() == 3
    assert list_claims(open_run(url, served())) == []


KILLED = """
import os, signal, sys, torch
sys.path[:0] = {path!r}
from ckptguard.storage.remote import multipart as parts_s3
import ckptguard
from support.runs import QUICK
settings = QUICK.changed(storage={options!r})
model = torch.nn.Linear(4096, 1200)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
guard = ckptguard.TrainingGuard({url!r}, model=model, optimizer=optimizer, daemon="off", settings=settings)
guard.save(step=1)
real = parts_s3.S3Parts.put
def put(self, number, data):
    real(self, number, data)
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
parts_s3.S3Parts.put = put
guard.save(step=2)
"""


def test_what_a_killed_save_left_is_collected(store, moto):
    """Unfinished uploads show in no listing, but the claim tells of them; the checkpoint before is untouched."""
    bucket, _, folder = store.removeprefix("s3://").partition("/")
    script = KILLED.format(path=sys.path, options={f"s3://{bucket}": moto.options}, url=store)
    process = Forked(script)
    _, trouble = process.communicate(120)
    assert process.returncode == -signal.SIGKILL, trouble

    def uploads():
        return moto.client().list_multipart_uploads(Bucket=bucket, Prefix=folder).get("Uploads", [])

    assert len(uploads()) == 1
    assert [claim.path for claim in list_claims(open_run(store, served()))] == ["step-000000002"]
    guard = guard_of(store, torch.nn.Linear(4096, 1200))
    assert uploads() == []
    assert list_claims(open_run(store, served())) == []
    assert guard.resume() == 1
    guard.save(step=2)
    assert guard.resume() == 2


LEFT = """
import sys, torch
sys.path[:0] = {path!r}
import ckptguard
from support.runs import QUICK
settings = QUICK.changed(storage={options!r})
guard = ckptguard.TrainingGuard({url!r}, model=torch.nn.Linear(4096, 1200), daemon="off", settings=settings)
guard.save(step=1, blocking=False)
"""


def test_a_save_in_flight_when_the_interpreter_ends_is_finished(store, moto):
    """Executors take no more work by then; the parts are sent all the same."""
    options = {store.rpartition("/")[0]: moto.options}
    script = LEFT.format(path=sys.path, options=options, url=store)
    process = Forked(script)
    _, trouble = process.communicate(120)
    assert (process.returncode, trouble) == (0, "")
    assert verify_target(store, served(QUICK)).outcome is Outcome.GOOD
    assert stored(store) == ["step-000000001/model.safetensors", "step-000000001/state.json"]


def test_what_nobody_claimed_is_never_collected(url):
    """A checkpoint that was copied here without its records is somebody's, whatever its age."""
    storage = open_run(url, served(), must_exist=False).storage
    storage.create("step-000000004/model.safetensors", b"somebody's")
    guard_of(url)
    assert stored(url) == ["step-000000004/model.safetensors"]


def test_users_own_functions_get_urls(url):
    """`save=` and `load=` are handed the URL under which their file lies; half a file is not left behind."""
    import fsspec

    options, model, places = served().storage.for_url(url), torch.nn.Linear(20, 5), []

    def save(place, step):
        places.append(place)
        with fsspec.open(place, "wb", **options) as file:
            torch.save(model.state_dict(), file)
        if step == 2:
            raise OSError("gone")

    def load(place):
        with fsspec.open(place, "rb", **options) as file:
            model.load_state_dict(torch.load(file))

    guard = guard_of(url, model, save=save, load=load)
    guard.save(step=1)
    want = model.weight.detach().clone()
    with pytest.raises(OSError, match="gone"):
        guard.save(step=2)
    assert stored(url) == ["step-1.pt"]
    torch.nn.init.zeros_(model.weight)
    assert guard.resume() == 1
    assert torch.equal(model.weight, want)
    assert places == [f"{url}/step-1.pt", f"{url}/step-2.pt"]


def test_shards_of_several_ranks_need_a_folder(url):
    """Said in one sentence, before training begins."""
    with pytest.raises(SettingsError, match="local folder"):
        local_root(open_run(url, served(), must_exist=False))
