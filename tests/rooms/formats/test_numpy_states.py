"""The states that pickles set on numpy's types and arrays: what numpy would not take is no whole file."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from support.format_files import structure_of

TYPES = ("<f4", ">f8", "<c8", "<i8", "|b1", "|O", "<U3", "|S2", "|V4", "<M8[s]", [("a", "<f4"), ("b", "<i2", (2,))])
ODD = (None, 0, -1, 7, 2**31, "x", "|", (), [], True, ("a",), b"ab")


class Made:
    """Pickled as what makes it."""

    def __init__(self, *reduced: object) -> None:
        self.reduced = reduced

    def __reduce__(self) -> tuple[object, ...]:
        return self.reduced


def with_odd_parts(parts: tuple[object, ...]) -> list[tuple[object, ...]]:
    """A tuple with each of its parts replaced by something odd, one too many, and one missing."""
    changed = [(*parts[:n], odd, *parts[n + 1 :]) for n in range(len(parts)) for odd in ODD]
    return [*changed, (*parts, None), parts[:-1]]


def states_of(array: np.ndarray) -> list[object]:
    """The array, and as it would be with a changed state of its own or of its type."""
    make, args, (version, shape, dtype, *rest) = array.__reduce__()
    kind, words, state = dtype.__reduce__()
    types = [Made(kind, words, odd) for odd in with_odd_parts(state)]
    types += [Made(kind, odd, state) for odd in with_odd_parts(words) if len(odd) == 3]
    states = [(version, shape, one, *rest) for one in types] + with_odd_parts((version, shape, dtype, *rest))
    return [array, *(Made(make, args, one) for one in states)]


@pytest.mark.filterwarnings("ignore:.*align")  # of what is odd, and loads
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("protocol", [2, 4])
def test_what_is_accepted_loads(dtype, protocol, tmp_path):
    """By pickle itself; what numpy wrote is accepted."""
    accepted = []
    for made in states_of(np.zeros(2, dtype)):
        data = pickle.dumps({"model": made}, protocol)
        if not structure_of(tmp_path, "a.pkl", data).problems:
            accepted.append(pickle.loads(data)["model"])
    assert accepted[0].dtype == np.dtype(dtype).newbyteorder("=")
    assert all(isinstance(array, np.ndarray) for array in accepted)
