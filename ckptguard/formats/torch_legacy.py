"""What torch.save wrote before its zip format: pickles, then the storages one after another."""

from __future__ import annotations

from ckptguard.formats.pickle_constants import PickleProblem
from ckptguard.formats.pickle_reader import MAX_STREAM, read_pickle
from ckptguard.formats.structure import Format, Problem, Structure
from ckptguard.formats.suffixes import has_tensor_suffix, is_pickle_name
from ckptguard.storage.protocol import Reader

MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."


def matches(path: str, head: bytes) -> bool:
    """By a tensor suffix (or a pickle's) and the magic number that these files begin with."""
    return head.startswith(MAGIC) and (has_tensor_suffix(path) or is_pickle_name(path))


def read(reader: Reader, path: str) -> Structure:
    """Only the names in its pickles; the metadata say that the numbers were not looked at."""
    data = reader.read(0, min(reader.entry.size, MAX_STREAM))
    names: set[str] = set()
    problems = []
    position = 0
    for _ in range(5):  # magic, protocol, system, state, keys of the storages
        try:
            pickled = read_pickle(data, position)
        except PickleProblem as error:
            names |= error.globals
            problems.append(Problem(message=str(error)))
            return _structure(problems, error.ends_early, names)
        names |= pickled.globals
        position = pickled.end
    return _structure(problems, False, names)


def _structure(problems: list[Problem], truncated: bool, names: set[str]) -> Structure:
    return Structure(
        format=FORMAT.name,
        problems=tuple(problems),
        truncated=truncated,
        globals=tuple(sorted(names)),
        metadata={"unread": "legacy torch file"},
    )


FORMAT = Format(name="torch_legacy", matches=matches, read=read)
