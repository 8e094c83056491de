"""A rollback rewrites a user's file only if its name and its whole content are those of a pointer."""

import os
import random
import stat

import pytest
from support.runs import write_safetensors
from support.views import look

from ckptguard.errors import NotFoundError, StorageFullError
from ckptguard.records.run import open_run
from ckptguard.recover import roll_back as module
from ckptguard.recover.roll_back import GoBack, roll_back, undo_pointers
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.settings import Settings

NAMED = Settings(settle=0.0, pointers=("my-pointer*",))
BACK = GoBack(reason="test", check_writing=False, before_step=300)
NAMES = [
    *("latest", "latest.txt", "latest_step", "last_checkpoint", "last_checkpoint.rank_0", "checkpoint", "my-pointer.1"),
    *("notes.txt", "log of runs.md", "README", "runs.csv", "conf.yaml", "conf.json", "go.sh", "current", "the latest"),
    *("alatest", "my-checkpoint", "checkpoint.bak", "last", "LAST_CKPT", "resume_from"),
]
ENDS = ["", "\n", "\r\n"]
OTHERS = [
    "resume from {}",
    " {}",
    "{} ",
    "{}\n\n",
    "{}\nmodel-200",
    "a,{}",
    "{},0.5",
    "step,path\n300,{}\n",
    "resume: {}\n",
    '{{"resume": "{}"}}',
    '"{}"',
    "#!/bin/sh\npython train.py --resume {}\n",
    "s3://bucket/{}",
    "file://{}",
    "\ufeff{}",
    "{}\0",
    "{}\t",
    "see /data/my runs/{}",
    "{}" + "x" * 9000,
    "x" * 200_000 + " {}",
    "nothing at all",
    "",
]


def own_files(run):
    """What the user has in a run: name to content, mode and time of a file, or target of a link."""
    found = {}
    for path in sorted(run.rglob("*")):
        if "_ckptguard" in path.parts or (path.is_dir() and not path.is_symlink()):
            continue
        status = path.lstat()
        link = stat.S_ISLNK(status.st_mode)
        text = os.readlink(path).encode() if link else path.read_bytes()
        when = None if link else (stat.S_IMODE(status.st_mode), status.st_mtime_ns)
        found[str(path.relative_to(run))] = (text, when)
    return found


def is_pointer_by_law(name, content):
    """The law, written down a second time: one token that is the sick checkpoint's name, under a name of a pointer."""
    low = name.lower()
    named = low.startswith(("latest", "last_checkpoint", "my-pointer")) or low == "checkpoint"
    for end in (b"\r\n", b"\n"):
        if content.endswith(end):
            content = content[: -len(end)]
            break
    tail = content.split(b"/")[-1]
    return named and tail == b"model-300" and not any(c in content for c in b" \t\n\r,\0\xef") and b"://" not in content


def a_run(folder):
    for step in (100, 200, 300):
        write_safetensors(folder, step, seed=step)
    return folder


@pytest.mark.parametrize("seed", range(40))
def test_only_true_pointers_differ_after_a_rollback(tmp_path, seed):
    """Every other file keeps its bytes, mode and time; undoing gives the pointers theirs back exactly."""
    rng = random.Random(seed)
    run = a_run(tmp_path / "run")
    for name in NAMES:
        said = rng.choice(["model-300", "model-300", "./model-300", f"{run}/model-300"])
        form = "{}" + rng.choice(ENDS) if rng.random() < 0.5 else rng.choice(OTHERS)
        (run / name).write_bytes(form.format(said).encode())
        (run / name).chmod(rng.choice([0o644, 0o600, 0o664, 0o755]))
    (run / "binary").write_bytes(b"\xff\xfe model-300 \x00")
    (run / "good").symlink_to("model-200")
    if rng.random() < 0.5:
        (run / "newest").symlink_to("model-300")
    reconcile(look(open_run(str(run)), NAMED), PassNotes())
    before = own_files(run)
    for path in run.iterdir():
        if path.is_file() and not path.is_symlink():
            os.utime(path, ns=(10**18 + seed, 10**18 + seed))
    before = own_files(run)
    done = roll_back(look(open_run(str(run)), NAMED), BACK)
    after = own_files(run)
    moved = {name for name in before if name.startswith("model-300/")}
    changed = {name for name in before if name not in moved and before[name] != after.get(name)}
    expected = {name for name in NAMES if is_pointer_by_law(name, before[name][0])}
    expected |= {"newest"} & before.keys()
    assert changed == expected == {pointer.key for pointer in done.pointed}
    for name in changed:
        assert after[name][0] in (before[name][0].replace(b"model-300", b"model-200"), _plain(before[name][0]))
        assert after[name][1] is None or after[name][1][0] == before[name][1][0]
    assert after.keys() - before.keys() == set()
    assert not {m.key for m in done.mentions} & changed
    if changed:
        undone = undo_pointers(look(open_run(str(run)), NAMED))
        assert set(undone.pointers) == changed
        assert own_files(run) == {n: v for n, v in before.items() if n not in moved}
    with pytest.raises(NotFoundError):
        undo_pointers(look(open_run(str(run)), NAMED))


def _plain(content):
    """The same with a name as it is seen from the run's root."""
    return content.replace(b"./model-300", b"model-200")


def test_what_mentions_a_checkpoint_is_reported_and_stays(tmp_path):
    """In a dry run and in the result; a longer name that begins alike is no mention."""
    run = a_run(tmp_path / "run")
    texts = {"notes.txt": "model-300", "runs.csv": "a,model-300,1\n", "README": "try model-300.\n", "x": "model-3000"}
    for name, text in texts.items():
        (run / name).write_text(text)
    reconcile(look(open_run(str(run))), PassNotes())
    for dry_run in (True, False):
        done = roll_back(
            look(open_run(str(run))), GoBack(reason="t", check_writing=False, before_step=300, dry_run=dry_run)
        )
        assert {(m.key, m.path) for m in done.mentions} == {
            (n, "model-300") for n in ("notes.txt", "runs.csv", "README")
        }
        assert {name: (run / name).read_text() for name in texts} == texts


def test_a_path_to_a_checkpoint_of_another_run_stays(tmp_path):
    """It has the same name there. Of a path that is nowhere it cannot be told: the run may have another in a
    container."""
    run, teacher = a_run(tmp_path / "run"), tmp_path / "teacher"
    (teacher / "model-300").mkdir(parents=True)
    (tmp_path / "linked").symlink_to(run)
    texts = {
        "latest_teacher": f"{teacher}/model-300",
        "latest_teacher_beside": "../teacher/model-300",
        "latest_here": f"{run}/model-300",
        "latest_beside": "../run/model-300",
        "latest_linked": f"{tmp_path}/linked/model-300",
        "latest_away": "/mnt/elsewhere/model-300",
    }
    for name, text in texts.items():
        (run / name).write_text(text)
    reconcile(look(open_run(str(run))), PassNotes())
    done = roll_back(look(open_run(str(run))), BACK)
    changed = {name for name, text in texts.items() if (run / name).read_text() != text}
    assert changed == {"latest_here", "latest_beside", "latest_linked", "latest_away"}
    assert {mention.key for mention in done.mentions} == {"latest_teacher", "latest_teacher_beside"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_root_rewrites_stays_its_owners(tmp_path):
    """A trainer writes `latest` in place: it must be able to go on."""
    run = a_run(tmp_path / "run")
    (run / "latest").write_text("model-300")
    (run / "final").symlink_to("model-300")
    for path in (run, *run.rglob("*")):
        os.lchown(path, 1234, 1235)
    reconcile(look(open_run(str(run))), PassNotes())
    roll_back(look(open_run(str(run))), BACK)
    assert ((run / "latest").read_text(), os.readlink(run / "final")) == ("model-200", "model-200")
    owners = {(path.lstat().st_uid, path.lstat().st_gid) for path in run.rglob("*") if "_ckptguard" not in path.parts}
    assert owners == {(1234, 1235)}


def test_a_pointer_that_was_changed_since_is_not_put_back(tmp_path):
    """Training went on, and what it wrote is newer than what the rollback kept."""
    run = a_run(tmp_path / "run")
    (run / "latest").write_text("model-300")
    reconcile(look(open_run(str(run))), PassNotes())
    roll_back(look(open_run(str(run))), BACK)
    (run / "latest").write_text("model-100")
    assert undo_pointers(look(open_run(str(run)))).left == ("latest",)
    assert (run / "latest").read_text() == "model-100"


def test_nothing_is_rewritten_before_the_old_content_is_on_record(tmp_path, monkeypatch):
    """If the record cannot be written, pointers keep their content; a crash after it leaves what undoing needs."""
    run = a_run(tmp_path / "run")
    (run / "latest").write_text("model-300")
    (run / "last_checkpoint").write_text("model-300\n")
    reconcile(look(open_run(str(run))), PassNotes())
    before = own_files(run)

    def full(*args):
        raise StorageFullError("no space left", key="rewrites")

    with monkeypatch.context() as patch:
        patch.setattr(module, "record_rewrites", full)
        with pytest.raises(StorageFullError):
            roll_back(look(open_run(str(run))), BACK)
    assert all(own_files(run)[name] == before[name] for name in ("latest", "last_checkpoint"))
    real = module.write_pointers

    def killed(of, rewrites):
        real(of, rewrites[:1])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_pointers", killed)
        with pytest.raises(KeyboardInterrupt):
            roll_back(look(open_run(str(run))), GoBack(reason="t", check_writing=False))
    assert sum(own_files(run)[n][0] != before[n][0] for n in ("latest", "last_checkpoint")) == 1
    undo_pointers(look(open_run(str(run))))
    assert all(own_files(run)[name] == before[name] for name in ("latest", "last_checkpoint"))
