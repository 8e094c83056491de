"""The order of bulk work, by generated jobs."""

import hypothesis
import hypothesis.strategies as st

from ckptguard.decisions.bulk_order import EACH_FILE, BulkJob, BulkQueue, parts_of, seconds_for


@st.composite
def some_jobs(draw):
    """Jobs in a few chains."""
    drawn = draw(st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 2), st.integers(0, 3), st.integers(0, 9))))
    return [BulkJob(number=n, chain=c, protection=p, last=float(t), bytes=b) for n, (c, p, t, b) in enumerate(drawn)]


@hypothesis.given(some_jobs(), st.data())
def test_each_job_is_begun_once_and_chains_keep_their_order(jobs, data):
    """However many are under way at once, and in whatever order they are done."""
    waiting, under_way, begun = BulkQueue(jobs), [], []
    while True:
        job = waiting.take() if not under_way or data.draw(st.booleans()) else None
        if job is not None:
            assert job.chain not in {other.chain for other in under_way}
            under_way.append(job)
            begun.append(job)
        elif under_way:
            waiting.free(under_way.pop(data.draw(st.integers(0, len(under_way) - 1))))
        else:
            break
    assert len(waiting) == 0
    assert sorted(job.number for job in begun) == list(range(len(jobs)))
    for chain in "abcde":
        numbers = [job.number for job in begun if job.chain == chain]
        assert numbers == sorted(numbers)


@hypothesis.given(some_jobs())
def test_the_least_protected_come_first_then_the_longest_unread_then_the_largest(jobs):
    """Of the jobs that could begin, none goes before a better one."""
    alone = [BulkJob(number=job.number, chain=str(job.number), **_rank(job)) for job in jobs]
    waiting = BulkQueue(alone)
    taken = [waiting.take() for _ in alone]
    assert waiting.take() is None
    assert taken == sorted(alone, key=lambda job: (job.protection, job.last, -job.bytes, job.number))


def _rank(job):
    return {"protection": job.protection, "last": job.last, "bytes": job.bytes}


def test_a_long_chain_begins_early():
    """What has most left to read would else end last, alone."""
    chain = [BulkJob(number=n, chain="long", bytes=2) for n in range(4)]
    assert BulkQueue([BulkJob(number=9, chain="short", bytes=5), *chain]).take() == chain[0]


@hypothesis.given(st.lists(st.integers(0, 100)), st.integers(1, 50))
def test_parts_have_every_file_once(sizes, small):
    """The large ones alone and first, the small ones together."""
    files = [(f"f{n}", size) for n, size in enumerate(sizes)]
    parts = parts_of(files, small)
    assert sorted(name for part in parts for name in part) == sorted(name for name, _ in files)
    of = dict(files)
    assert all(len(part) == 1 or all(of[name] < small for name in part) for part in parts)
    loads = [of[part[0]] for part in parts if of[part[0]] >= small]
    assert loads == sorted(loads, reverse=True)


def test_the_estimate_is_of_the_slower():
    """A rate that workers cannot reach promises nothing. Each file takes some time besides its bytes."""
    assert seconds_for(1000, 0, workers=4, rate=10.0) == 100
    assert seconds_for(10**9, 0, workers=2, rate=1e12) == seconds_for(10**9, 0, workers=2, rate=None) == 10
    assert seconds_for(1000, 80, workers=4, rate=10.0) == 100 + 80 * EACH_FILE / 4
