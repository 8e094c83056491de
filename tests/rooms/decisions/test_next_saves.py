"""How much room the next saves need, and which copies go: decided from values alone."""

from hypothesis import given
from hypothesis import strategies as st

from ckptguard.decisions.room import Held, NextSave, SeriesSaves, next_save, to_release, together

held = st.builds(Held, now=st.integers(0, 9), later=st.integers(0, 9), stays=st.booleans())


@given(st.lists(held, max_size=8), st.integers(0, 40), st.integers(0, 40))
def test_as_few_as_needed_go_the_oldest_first(oldest_first, free, needed):
    """What stays never goes. After the release the next saves fit now and later, or nothing is left that may go."""
    gone = to_release(oldest_first, free, needed)
    may_go = [number for number, one in enumerate(oldest_first) if not one.stays]
    assert gone == may_go[: len(gone)]

    def room(released):
        later = sum(oldest_first[n].later for n in may_go if n not in released)
        return free + sum(oldest_first[n].now for n in released) - later

    assert room(gone) >= needed or gone == may_go
    assert not gone or room(gone[:-1]) < needed


def test_series_of_one_run_are_saved_together():
    """A model and an optimizer need room at the same time; of files that were saved once, long ago, the largest."""
    times = (100.0, 110.0, 120.0)
    saved = [SeriesSaves(bytes=10, saved_at=times), SeriesSaves(bytes=20, saved_at=times)]
    once = [SeriesSaves(bytes=n, saved_at=(1.0,)) for n in (3, 5)]
    assert next_save([*saved, *once]) == NextSave(bytes=35, until=150.0)
    assert next_save(once).bytes == 8  # nothing says yet which of them comes again


def test_runs_on_one_disk_may_save_at_the_same_time():
    """Those that train count together, of the others the largest; a reserve comes on top."""
    runs = [NextSave(bytes=1600, until=10.0), NextSave(bytes=3200, until=10.0), NextSave(bytes=1600, until=4.0)]
    assert together(runs, 5.0) - together([], 5.0) == 6400 + 400 + (1 << 20)
