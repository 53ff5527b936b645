"""Foreign bytes break nothing: a short run of every fuzz job (`make fuzz MINUTES=60` is a long one).

The same inputs each time, so that a red one stays red; the corpus first, then changes of it.
"""

import random
import time

import pytest

from fuzz.jobs import JOBS, corpus_of, run_one
from fuzz.mutations import mutate

INPUTS = 400  # of a job
MOST_S = 6.0  # of a job: what a slow machine has not fed by then it leaves out


@pytest.mark.parametrize("job", JOBS)
def test_whatever_is_fed_is_taken_or_refused_in_order(job: str) -> None:
    corpus, until_s = corpus_of(job), time.monotonic() + MOST_S
    assert corpus
    with JOBS[job]() as feed:
        for number, data in enumerate(corpus):
            assert run_one(feed, data) is None, f"input {number} of the corpus"
        for number in range(INPUTS):
            if time.monotonic() > until_s:
                break
            data = mutate(random.Random(f"suite/{job}/{number}"), corpus)
            assert run_one(feed, data) is None, f"input {number}: {data[:200]!r}"


def test_a_job_that_raises_is_seen() -> None:
    def feed(data: bytes) -> None:
        raise KeyError(data[:3])

    assert run_one(feed, b"abcdef") == "KeyError: b'abc'"


def test_no_input_is_fed_twice_in_a_row_and_the_same_seed_feeds_the_same() -> None:
    corpus = corpus_of("http")
    fed = [mutate(random.Random(f"a/{n}"), corpus) for n in range(200)]
    assert len(set(fed)) > 150
    assert fed == [mutate(random.Random(f"a/{n}"), corpus) for n in range(200)]
