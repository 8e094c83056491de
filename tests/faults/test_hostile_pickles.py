"""Armed pickles: nothing in them ever runs, they cost bounded time and memory, and what they name is listed."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from faults.hostile.assembly import text
from faults.hostile.pickles import armed_pickles
from support.format_files import structure_of, torch_archive, torch_bytes

from ckptguard.formats import read_structure
from ckptguard.formats.pickle.constants import PickleProblem
from ckptguard.formats.pickle.machine import read_pickle
from ckptguard.storage import open_storage

_EVENTS: list[tuple[str, Any]] = []
_WATCHING = [False]
_FORBIDDEN = ("exec", "os.system", "os.exec", "os.fork", "subprocess.Popen", "compile", "pickle.find_class", "open")


def _audit(event: str, args: Any) -> None:
    if _WATCHING[0] and (event in _FORBIDDEN or event == "import"):
        _EVENTS.append((event, args))


sys.addaudithook(_audit)  # hooks cannot be removed, so this one is switched


@pytest.mark.parametrize("name", ["state.pkl", "model.pt", "inside.pt"])
def test_nothing_runs_and_the_global_is_listed(tmp_path: Path, name: str) -> None:
    """Reading an armed pickle, bare or in an archive, imports, opens and runs nothing; its globals are named."""
    structure_of(tmp_path, "warm.pt", torch_bytes({"w": 1}))  # our own lazy imports are not what is watched
    structure_of(tmp_path, "warm.pkl", b"N.")
    for kind, (data, expected) in armed_pickles(tmp_path / "canary").items():
        if name == "model.pt" and data[0] != 0x80:
            continue
        _EVENTS.clear()
        (tmp_path / name).write_bytes(torch_archive(data) if name == "inside.pt" else data)
        with open_storage(tmp_path).open(name) as reader:
            _WATCHING[0] = True
            try:
                structure = read_structure(reader, name)
            finally:
                _WATCHING[0] = False
        allowed = {"isal", "isal.isal_zlib"}
        assert [e for e in _EVENTS if not (e[0] == "import" and e[1][0] in allowed)] == [], kind
        assert expected is None or expected in structure.globals, kind
    assert not list(tmp_path.glob("canary*"))


BOMBS = {
    "deep lists": b"]" * 300_000 + b"a" * 299_999 + b".",
    "deep tuples": b"\x80\x02)" + b"\x85" * 500_000 + b".",
    "deep tuples as a key": b"\x80\x02})" + b"\x85" * 500_000 + b"K\x01s.",
    "deep calls": b"\x80\x02cos\nsystem\n" + b")R" * 300_000 + b".",
    "deep marks": b"(" * 1_000_000 + b".",
    "laughs": b"\x80\x02K\x01" + b"".join(b"2\x86" for _ in range(10_000)) + b".",
    "laughs of lists": b"\x80\x02](K\x01e" + b"q\x00](h\x00h\x00e" * 5_000 + b".",
    "a list in itself": b"\x80\x02]q\x00h\x00a.",
    "a call in itself": b"\x80\x02cos\nsystem\n)Rq\x00h\x00a}h\x00h\x00sb.",
    "states on states": b"\x80\x02cos\nsystem\n)R" + b"K\x01b" * 100_000 + b".",
}


@pytest.mark.parametrize("kind", sorted(BOMBS))
@pytest.mark.parametrize("name", ["bomb.pkl", "bomb.pt"])
@pytest.mark.timeout(120)  # bounded, but on a busy machine slow
def test_bombs_end_in_a_structure(tmp_path: Path, kind: str, name: str) -> None:
    """Deep nesting, self-reference and doubling cost bounded time and never raise."""
    data = torch_archive(BOMBS[kind]) if name == "bomb.pt" else BOMBS[kind]
    structure = structure_of(tmp_path, name, data)
    assert len(structure.leaves) <= 20_000


REFUSED = {
    "EXT1": b"\x80\x02\x82\x01.",
    "EXT4": b"\x80\x02\x84\x01\x00\x00\x00.",
    "out-of-band buffer": b"\x80\x05\x97.",
    "computed module": b"\x80\x04K\x01" + text("system") + b"\x93.",
    "huge text": b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"x.",
    "huge bytes": b"\x80\x04\x8e" + struct.pack("<Q", 2**63) + b"x.",
    "huge integer": b"\x80\x02\x8b" + struct.pack("<i", 2**30) + b"x.",
    "negative integer length": b"\x80\x02\x8b" + struct.pack("<i", -5) + b"x.",
    "long decimal": b"I" + b"9" * 10_000 + b"\n.",
    "memo never set": b"\x80\x02h\x05.",
    "memo far away": b"g99999999999999999999\n.",
    "unknown opcode": b"\x80\x02\xff.",
    "unknown protocol": b"\x80\x09N.",
    "empty stack": b"\x80\x02.",
    "two values": b"\x80\x02NN.",
    "open mark": b"\x80\x02(N.",
    "odd dict": b"\x80\x02}(Nu.",
    "append to a number": b"\x80\x02K\x01Na.",
    "state on a number": b"\x80\x02K\x01}b.",
    "no mark": b"\x80\x02t.",
    "persistent id of nothing": b"\x80\x02Q.",
    "too many opcodes": b"\x80\x02" + b"N0" * 200 + b"N.",
}


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_what_is_refused_is_a_problem(kind: str) -> None:
    """Extensions, buffers, computed names, absurd lengths and nonsense are problems, nothing else."""
    with pytest.raises(PickleProblem):
        read_pickle(REFUSED[kind], budget=9600)
