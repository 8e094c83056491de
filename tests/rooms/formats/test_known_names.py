"""What pickles may name: each name of the table is one that loading finds, and no other is passed in silence."""

import pickle
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptguard.formats.pickle import known_calls

NAMES = {module: known_calls._names_of(module) for module in known_calls._NAMES.keys() | known_calls._TABLED}
MODULES = sorted(module for module, names in NAMES.items() if names is not None)
WORDS = sorted(set().union(*(NAMES[module] for module in MODULES)))


def loads(module, name, protocol):
    """Whether the reference loader finds this name."""
    text = pickle.PROTO + bytes([protocol]) + f"c{module}\n{name}\n.".encode()
    try:
        pickle.loads(text)
    except (AttributeError, ImportError):
        return False
    return True


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("module", MODULES)
def test_every_known_name_is_found(module):
    """The table holds no name that only other versions have."""
    assert [name for name in sorted(NAMES[module]) if not loads(module, name, 2)] == []


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=1000, deadline=None, database=None)
@given(
    module=st.sampled_from(MODULES),
    name=st.one_of(
        st.sampled_from(WORDS),
        st.tuples(st.sampled_from(WORDS), st.sampled_from(WORDS)).map(".".join),
        st.text(string.ascii_letters + "_.", min_size=1, max_size=12),
    ),
    protocol=st.integers(0, 5),
)
def test_what_is_passed_in_silence_is_found(module, name, protocol):
    """Also a name that another module has, and a name in a name."""
    if known_calls.doubtful_name(module, name, protocol) is None:
        assert loads(module, name, protocol)
