"""What a replica has already in another checkpoint is not sent again: the store makes it from its own bytes."""

import itertools
import random
import uuid
from collections import Counter
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from servers.faulty_proxy import FaultyProxy
from servers.fixtures import S3_BUCKETS
from servers.s3 import S3Server
from support.crashes import Killed, kill_at
from support.run_contents import files_of, verify_all
from support.store_requests import Bill
from support.tiny_files import WEIGHTS, content, safetensors_head
from support.views import look

from ckptguard.errors import StorageError
from ckptguard.records.run import open_run
from ckptguard.recover.restore import restore
from ckptguard.replicas import send_checkpoint
from ckptguard.replicas.replicate import replicate
from ckptguard.retention.prune import prune
from ckptguard.runs.find_known_good import known_good_candidates
from ckptguard.runs.run_view import RunView
from ckptguard.storage.local.local_storage import LocalStorage
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.ids import CheckpointId
from ckptguard.values.retention_policy import Policy
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome
from ckptguard.verification.user_decisions import reseal

SETTINGS = Settings(settle=0.0, scan_interval=1.0, keep="none")
STEPS = (100, 200, 300, 400)
# A tokenizer, and a frozen model beside the trained one.
FROZEN = {
    "tokenizer.json": b'{"vocab": {' + b'"token": 1, ' * 20_000 + b'"end": 2}}',
    "frozen.safetensors": safetensors_head({"f": (100, 1000)}) + bytes(400_000),
}
AGAIN = sum(map(len, FROZEN.values()))  # bytes of each save that are as in the one before
TRAINED = sum(map(len, content(1).values()))


@pytest.fixture
def run(root):
    """A run of good checkpoints. Each has the trained weights of its own, and the same files besides."""
    for step in STEPS:
        add(root, step)
    opened = open_run(str(root))
    reconcile(RunView(opened, SETTINGS), PassNotes(), assume_quiet=True)
    return opened


def add(root, step, frozen=FROZEN):
    """Save a checkpoint."""
    folder = root / f"model-{step}"
    folder.mkdir(parents=True)
    for name, data in (content(step) | frozen).items():
        (folder / name).write_bytes(data)


@pytest.fixture
def proxy(moto):
    """What counts the requests to the bucket, and their bytes."""
    with FaultyProxy(moto.endpoint).running() as running:
        yield running


def place_of(kind, tmp_path):
    """A new place for a replica."""
    return str(tmp_path / "replica") if kind == "disk" else f"memory://shared-{uuid.uuid4().hex}"


def sent_and_shared(done):
    """The bytes of all checkpoints."""
    assert (done.trouble, done.behind) == (None, 0)
    return sum(one.sent for one in done.checkpoints), sum(one.shared for one in done.checkpoints)


def check_replica(run, replica):
    """It has every byte, and all of it is good."""
    assert files_of(replica) == files_of(run)
    assert set(verify_all(replica).values()) == {Outcome.GOOD}


@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_equal_files_are_sent_once(run, kind, tmp_path):
    """The trained weights of each save, and once what is equal in all, on a disk twice; a later save finds it, too."""
    url, again = place_of(kind, tmp_path), 2 if kind == "disk" else 1
    done = replicate(look(run), url)
    assert sent_and_shared(done) == (len(STEPS) * TRAINED + again * AGAIN, (len(STEPS) - again) * AGAIN)
    add(Path(run.url), 500)
    reconcile(RunView(run, SETTINGS), PassNotes(), assume_quiet=True)
    assert [(one.sent, one.shared) for one in replicate(look(run), url).checkpoints if one.done == "sent"] == [
        (TRAINED, AGAIN)
    ]
    check_replica(run, open_run(url))
    restored = restore(look(open_run(url)), str(tmp_path / "out"))
    assert restored.step == 500
    assert {name: (Path(restored.path) / name).read_bytes() for name in FROZEN} == FROZEN


def test_a_bucket_copies_for_itself(run, moto, proxy, tmp_path):
    """Of what is equal no second byte goes to the store, and no more requests than for sending it."""
    url = f"s3://{S3_BUCKETS[0]}/shared/{tmp_path.name}"
    behind = S3Server(proxy.url, moto.key, moto.secret)
    settings = Settings(settle=0.0, storage={f"s3://{S3_BUCKETS[0]}": behind.options})
    asked, bytes_of = {}, {}
    for shares in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not shares:
                patch.setattr(send_checkpoint, "_twins", lambda *_: {})
            begin, bill = proxy.received, Bill(proxy)
            done = replicate(RunView(run, settings), f"{url}/{shares}")
            bill.end()
        asked[shares], bytes_of[shares] = Counter(kind for kind, _ in bill.asked), proxy.received - begin
        assert sent_and_shared(done)[1] == (shares and (len(STEPS) - 1) * AGAIN)
        check_replica(run, open_run(done.url, settings))
    assert bytes_of[True] < 1.1 * AGAIN < len(STEPS) * AGAIN < bytes_of[False]
    assert asked[True]["PUT"] <= asked[False]["PUT"], asked
    assert asked[True].total() <= asked[False].total(), asked


@pytest.mark.parametrize("trouble", ["rotten", "cut", "gone", "cannot copy"])
@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_what_cannot_be_made_from_a_twin_is_sent(run, kind, trouble, tmp_path, monkeypatch):
    """The replica's own bytes are damaged or lost, or the store makes no copies: the new checkpoint is right."""
    url = place_of(kind, tmp_path)
    replicate(look(run), url, only=[look(run).history.current("model-#", 400, "model-400")])
    storage = open_run(url).storage
    for name, data in FROZEN.items():
        key = f"model-400/{name}"
        if trouble in ("rotten", "cut"):
            storage.remove(key)
            storage.create(key, data[:-1] if trouble == "cut" else data[:-9] + b"?" + data[-8:])
        elif trouble == "gone":
            storage.remove(key)
    if trouble == "cannot copy":
        monkeypatch.setattr(MemoryFileSystem, "cp_file", refuse)
        monkeypatch.setattr(LocalStorage, "copy", failing)
    done = replicate(look(run), url)
    assert sum(one.sent for one in done.checkpoints) >= (len(STEPS) - 1) * TRAINED + AGAIN
    outcomes = verify_all(open_run(url))
    assert [outcomes[f"model-{step}"] for step in (100, 200, 300)] == [Outcome.GOOD] * 3
    sealed, there = files_of(run), files_of(open_run(url))
    assert all(there[key] == sealed[key] for key in sealed if not key.startswith("model-400/"))


def refuse(*_, **__):
    """As a store without a request for copies."""
    raise NotImplementedError


def failing(*_, **__):
    """As a disk that makes none."""
    raise StorageError("no", key="")


def test_what_is_removed_takes_nothing_from_another(run, tmp_path):
    """Of files that share their bytes one goes, in any order, with the trash emptied: the other stays whole."""
    url = place_of("disk", tmp_path)
    replicate(look(run), url)
    inodes = [(Path(url) / f"model-{step}" / "tokenizer.json").stat().st_ino for step in STEPS]
    assert len(set(inodes)) == 2
    prune(look(open_run(url)), Policy(keep_last=1, keep_good=1), grace=0.0)
    there = open_run(url)
    assert {key.split("/")[0] for key in files_of(there)} == {"model-400"}
    assert {name: files_of(there)[f"model-400/{name}"] for name in FROZEN} == FROZEN
    assert verify_all(there)["model-400"] is Outcome.GOOD


@pytest.mark.parametrize("seed", range(6))
def test_one_fault_on_a_disk_leaves_a_neighbour_whole(run, seed, tmp_path):
    """Saves are sent in any order and pruned there. No two neighbours share bytes once the newer one has arrived; so
    of the newest two one is restored whole after a byte of a frozen file has turned."""
    chance, url = random.Random(seed), place_of("disk", tmp_path)
    for step in chance.sample(STEPS, len(STEPS)):
        replicate(look(run), url, only=[look(run).history.current("model-#", step, f"model-{step}")])
        there = sorted(int(path.name.removeprefix("model-")) for path in Path(url).glob("model-*"))
        inodes = {other: (Path(url) / f"model-{other}" / "tokenizer.json").stat().st_ino for other in there}
        at = there.index(step)
        assert inodes[step] not in [inodes[other] for other in (*there[max(at - 1, 0) : at], *there[at + 1 : at + 2])]
    prune(look(open_run(url)), Policy(keep_every=200, keep_good=1), grace=0.0)
    add(Path(run.url), 500)
    reconcile(RunView(run, SETTINGS), PassNotes(), assume_quiet=True)
    replicate(look(run), url, only=[look(run).history.current("model-#", 500, "model-500")])
    rotten = Path(url) / "model-500" / "tokenizer.json"
    rotten.write_bytes(rotten.read_bytes()[:-9] + b"?" + rotten.read_bytes()[-8:])
    restored = restore(look(open_run(url)), str(tmp_path / "out"))
    assert restored.step == 400
    assert {name: (Path(restored.path) / name).read_bytes() for name in FROZEN} == FROZEN


def test_a_kept_copy_on_a_disk_has_bytes_of_its_own(root, tmp_path):
    """A checkpoint whose path belongs to another generation in the replica shares no bytes with it."""
    add(root, 100)
    run, url = open_run(str(root)), place_of("disk", tmp_path)
    reconcile(RunView(run, SETTINGS), PassNotes(), assume_quiet=True)
    replicate(look(run), url)
    (root / "model-100" / WEIGHTS).write_bytes(content(7)[WEIGHTS])
    reconcile(RunView(run, SETTINGS), PassNotes(), assume_quiet=True)
    if not look(run).history.is_good(CheckpointId("model-#", 100, 2)):
        reseal(look(run), "model-100")
    assert sent_and_shared(replicate(look(run), url)) == (TRAINED + AGAIN, 0)


def test_a_replicator_that_is_killed_at_any_step_goes_on(run, tmp_path):
    """Killed before step 1, 2, ...: what the replica calls good is whole, and the next call completes it."""
    for number in itertools.count(1):
        url = str(tmp_path / f"replica-{number}")
        try:
            with kill_at(number):
                replicate(look(run), url)
            break
        except Killed:
            if number % 5:
                continue
        there = open_run(url, must_exist=False)
        outcomes = verify_all(there)
        assert all(outcomes[one.manifest.path] is Outcome.GOOD for one in known_good_candidates(look(there)))
        assert replicate(look(run), url).behind == 0
        check_replica(run, open_run(url))
    assert number > 15
