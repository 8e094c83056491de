"""Too little space is told before a byte is written, or waited for where that is asked for."""

import logging
import os
import types

import pytest
from support.runs import QUICK, write_safetensors
from support.views import look

from ckptguard.decisions.room import SPARE
from ckptguard.errors import SettingsError, StorageFullError
from ckptguard.keep.copies import keep_checkpoint
from ckptguard.records.run import open_run
from ckptguard.recover.restore import restore
from ckptguard.replicas.replicate import replicate
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.runs.free_space import need_room
from ckptguard.storage import open_storage
from ckptguard.values.ids import CheckpointId
from ckptguard.values.settings import Settings
from ckptguard.verification.target import verify_target


class Stop(Exception):
    """The wait is called off."""


@pytest.fixture
def free(monkeypatch):
    """How many bytes every file system says are free; each question takes the next answer, the last one stays."""
    answers = [10**15]

    def statvfs(place):
        left = answers.pop(0) if len(answers) > 1 else answers[0]
        return types.SimpleNamespace(f_bavail=left, f_frsize=1)

    monkeypatch.setattr(os, "statvfs", statvfs)
    return answers


def test_the_error_has_the_numbers(tmp_path, free):
    """What is needed, what is free, and where; exactly enough is enough."""
    free[:] = [999]
    with pytest.raises(
        StorageFullError, match=rf"no space left for it: .*1000 bytes.*999 bytes are free in {tmp_path}"
    ):
        need_room(open_storage(tmp_path), 1000, "it")
    need_room(open_storage(tmp_path), 999, "it")


def test_where_nobody_knows_what_is_free_nobody_asks(caplog):
    """An object store takes what it is sent."""
    need_room(open_storage("memory://room", must_exist=False), 10**18, "it", wait=True)
    assert caplog.text == ""


def test_it_waits_until_there_is_room_and_says_so_once(tmp_path, free, caplog):
    """The pauses are short, whoever waits knows it, and the end is told."""
    free[:] = [10, 10, 10, 5000]
    pauses, waiting = [], []
    with caplog.at_level(logging.WARNING, "ckptguard"):
        need_room(open_storage(tmp_path), 1000, "step-5", wait=True, pause=pauses.append, waits=waiting.append)
    assert max(pauses) <= 0.5
    assert waiting == [True, False]
    assert [r.getMessage() for r in caplog.records if "waiting for free space" in r.getMessage()] == [
        "ckptguard: no space left for step-5: it takes 1000 bytes, and 10 bytes are free in "
        f"{tmp_path}; waiting for free space"
    ]
    assert "there is enough free space now for step-5" in caplog.text


def test_waiting_can_be_called_off(tmp_path, free):
    """Between two pauses, and whoever waits knows that it is over."""
    free[:] = [10]
    waiting, pauses = [], []

    def check_stop():
        if len(pauses) == 3:
            raise Stop

    with pytest.raises(Stop):
        need_room(
            open_storage(tmp_path),
            99,
            "it",
            wait=True,
            check_stop=check_stop,
            waits=waiting.append,
            pause=pauses.append,
        )
    assert waiting == [True, False]


def test_a_restore_without_room_writes_nothing(tmp_path, free):
    """DEST is not even made; with room it is restored."""
    run = tmp_path / "run"
    write_safetensors(run, 10, 1)
    verify_target(str(run), QUICK)
    assert find_known_good(open_run(str(run))).step == 10
    free[:] = [100]
    with pytest.raises(StorageFullError, match="no space left"):
        restore(look(open_run(str(run))), str(tmp_path / "there"))
    assert not (tmp_path / "there").exists()
    free[:] = [10**9]
    assert restore(look(open_run(str(run))), str(tmp_path / "there")).step == 10


@pytest.mark.parametrize("keep", ["copy", "link"])
def test_a_link_is_made_where_a_copy_has_no_room(tmp_path, free, keep):
    """Where the next save fits and a copy beside it does not, the newest good save gets a link. Where not even the next
    save fits, nothing is made."""
    run = tmp_path / "run"
    name = write_safetensors(run, 10, 1)
    verify_target(str(run), Settings(settle=0.0, keep="none"))
    opened = open_run(str(run))
    checkpoint = look(opened, Settings(keep=keep)).checkpoint(name)
    id = CheckpointId(checkpoint.series, 10, 1)
    free[:] = [100]
    assert keep_checkpoint(look(opened, Settings(keep=keep)), checkpoint, id) is None
    assert not list((run / "_ckptguard" / "kept").rglob("*.safetensors*"))
    free[:] = [SPARE + int(1.2 * checkpoint.bytes)]
    assert keep_checkpoint(look(opened, Settings(keep=keep)), checkpoint, id).how in ("link", "reflink")


def test_the_setting_is_one_of_two_words():
    """Nonsense is refused with a sentence."""
    assert Settings(on_full="wait").on_full == "wait"
    with pytest.raises(SettingsError, match="on_full"):
        Settings(on_full="hope")


def test_a_replica_without_room_gets_nothing(tmp_path, free):
    """It is told with the numbers, and what was sent before needs no room again."""
    run, place = tmp_path / "run", tmp_path / "replica"
    write_safetensors(run, 10, 1)
    verify_target(str(run), QUICK)
    free[:] = [100]
    done = replicate(look(str(run)), str(place))
    assert [c.done for c in done.checkpoints] == ["failed"]
    assert "no space left for the replica of" in done.checkpoints[0].message
    assert not list(place.rglob("*.safetensors"))
    free[:] = [10**9]
    assert [c.done for c in replicate(look(str(run)), str(place)).checkpoints] == ["sent"]
    free[:] = [100]
    assert [c.done for c in replicate(look(str(run)), str(place)).checkpoints] == ["there"]
