"""The contracts of plugins: one class for each kind. Each calls the installed plugin as ckptguard does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ckptguard.formats.structure import Structure
from ckptguard.plugins.call import PluginError, call_plugin
from ckptguard.plugins.formats import structures_by_plugins
from ckptguard.plugins.installed import Plugin, find_plugin
from ckptguard.plugins.interface import INTERFACE, FoundCheckpoint, Remark, Saved
from ckptguard.storage import open_storage
from ckptguard.values.ids import is_safe_path
from ckptguard.values.settings import Settings

_MEMORY = Settings().worker_memory
_CUTS = 16


class _PluginContract:
    """What holds for every kind. `name` is that of the entry point, without the version of the interface."""

    kind: ClassVar[str]
    name: ClassVar[str]

    def plugin(self) -> Plugin:
        """The installed plugin."""
        found = find_plugin(self.kind, self.name)
        assert found is not None, f"no package has {self.name}.v{INTERFACE} in the group ckptguard.{self.kind}"
        return found

    def test_it_is_installed_for_this_interface(self) -> None:
        """ckptguard would use it."""
        assert self.plugin().refused == ""


class FormatContract(_PluginContract):
    """Of a format. `good()` returns the bytes of a whole file, and `tensors()` the names of all tensors in it."""

    kind = "formats"

    def good(self) -> bytes:
        """A whole file, as its writer leaves it."""
        raise NotImplementedError

    def tensors(self) -> Sequence[str]:
        """The names of its tensors."""
        raise NotImplementedError

    def read(self, folder: Path, data: bytes) -> Structure:
        """What ckptguard takes from the plugin for a file with these bytes."""
        key = f"model.{self.name}"
        (folder / key).write_bytes(data)
        return structures_by_plugins(open_storage(str(folder)), {key: key}, Settings())[key]

    def test_a_whole_file_is_understood(self, tmp_path: Path) -> None:
        """Each tensor is found, nearly every byte is in one, and nothing is wrong."""
        found = self.read(tmp_path, self.good())
        assert (found.problems, found.not_understood, found.truncated) == ((), (), False)
        assert sorted(tensor.name for tensor in found.tensors) == sorted(self.tensors())

    @pytest.mark.parametrize("part", range(_CUTS))
    def test_a_cut_file_is_never_whole(self, tmp_path: Path, part: int) -> None:
        """A file that ends early is bad, unfinished or not understood."""
        data = self.good()
        found = self.read(tmp_path, data[: len(data) * part // _CUTS])
        assert found.problems or found.not_understood or found.truncated

    def test_other_bytes_are_never_whole(self, tmp_path: Path) -> None:
        """Bytes of something else are bad or not understood."""
        for data in (b"", b"\xc1" * 5000, bytes(range(256)) * 40):
            found = self.read(tmp_path, data)
            assert found.problems or found.not_understood or found.truncated


class CheckContract(_PluginContract):
    """Of a check. `good()` returns a checkpoint that it accepts, and `doubtful()` one that it does not."""

    kind = "checks"

    def good(self) -> Saved:
        """A checkpoint without anything to say about it."""
        raise NotImplementedError

    def doubtful(self) -> Saved:
        """One that breaks the rule."""
        raise NotImplementedError

    def remarks(self, saved: Saved) -> tuple[Remark, ...]:
        """What ckptguard takes from the plugin."""
        return call_plugin(self.plugin(), saved, tuple[Remark, ...], memory=_MEMORY)

    def test_a_good_checkpoint_stays_good(self) -> None:
        """It says nothing heavy."""
        assert [r for r in self.remarks(self.good()) if r.severity in ("error", "sickness")] == []

    def test_a_doubtful_checkpoint_does_not(self) -> None:
        """It says something heavy."""
        assert any(r.severity in ("error", "sickness") for r in self.remarks(self.doubtful()))

    def test_a_checkpoint_without_tensors_is_no_failure(self) -> None:
        """It answers."""
        self.remarks(Saved("step-1", 1, ()))


class ChannelContract(_PluginContract):
    """Of a channel. `address()` returns one that works, and `broken()` one where nothing answers. `arrived()` says how
    many events reached it."""

    kind = "channels"
    event: ClassVar[Mapping[str, Any]] = {"event": "test", "id": "1", "title": "a test", "text": "nothing happened"}

    def address(self) -> str:
        """An address that works."""
        raise NotImplementedError

    def broken(self) -> str:
        """An address where nothing answers."""
        raise NotImplementedError

    def arrived(self) -> int:
        """How many events reached the address."""
        raise NotImplementedError

    def test_an_event_arrives_once(self) -> None:
        """One event is delivered once."""
        before = self.arrived()
        call_plugin(self.plugin(), (self.address(), self.event), type(None), memory=_MEMORY)
        assert self.arrived() == before + 1

    def test_a_failure_is_raised(self) -> None:
        """What did not arrive is not said to have arrived."""
        with pytest.raises(PluginError):
            call_plugin(self.plugin(), (self.broken(), self.event), type(None), memory=_MEMORY)


class LayoutContract(_PluginContract):
    """Of a layout. `names()` returns the files of a run, and `checkpoints()` the files of each checkpoint in it."""

    kind = "layouts"

    def names(self) -> Sequence[str]:
        """The paths of a run's files."""
        raise NotImplementedError

    def checkpoints(self) -> Mapping[str, Sequence[str]]:
        """The files of each checkpoint, by its path."""
        raise NotImplementedError

    def found(self, names: Sequence[str]) -> tuple[FoundCheckpoint, ...]:
        """What ckptguard takes from the plugin."""
        return call_plugin(self.plugin(), tuple(names), tuple[FoundCheckpoint, ...], memory=_MEMORY)

    def test_the_checkpoints_are_found(self) -> None:
        """Each, with all its files, and nothing missing."""
        found = {one.path: (sorted(one.files), one.missing) for one in self.found(self.names())}
        assert found == {path: (sorted(files), ()) for path, files in self.checkpoints().items()}

    def test_only_files_that_exist_are_claimed(self) -> None:
        """Also when one file of the run is gone."""
        for gone in self.names():
            names = [name for name in self.names() if name != gone]
            for one in self.found(names):
                assert set(one.files) <= set(names)
                assert all(map(is_safe_path, (one.path, *one.missing)))
