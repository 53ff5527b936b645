"""The record of a prefill: what every token is, whether it is counted or looked at."""

import copy
import pickle
from collections import Counter
from collections.abc import Sequence

import pytest

from kvweave.fuse.record import TokenStates, chunk_records
from kvweave.fuse.request import FuseRequest, State, classify
from kvweave.kv.format.keys import ChunkKey
from kvweave.reasons import Reason

A, B, C, D = (ChunkKey(bytes([i]) * 32) for i in range(4))
CHUNKS = [(A, [1, 2]), (B, [3]), (C, [4, 5, 6]), (D, [7, 8])]
E, R, X, N = State.EXACT, State.REUSED, State.RECOMPUTED, State.COMPUTED


def make_request(present: set[ChunkKey]) -> FuseRequest:
    return classify([9, 9], CHUNKS, [9, 9, 9], present=present, first_is_exact=True)


WANT = [
    ({A, C, D}, (6, 8), (E, E, E, E, N, R, X, R, X, R, N, N, N)),
    ({A, B, C, D}, (), (E, E, E, E, R, R, R, R, R, R, N, N, N)),
    ({A, B, C, D}, (4, 5, 6, 7, 8, 9), (E, E, E, E, X, X, X, X, X, X, N, N, N)),
    (set[ChunkKey](), (), (E, E, N, N, N, N, N, N, N, N, N, N, N)),
]


@pytest.mark.parametrize(("present", "recomputed", "want"), WANT)
def test_every_token_is_what_was_done_with_it(
    present: set[ChunkKey], recomputed: Sequence[int], want: tuple[State, ...]
) -> None:
    states = TokenStates(make_request(present), recomputed)
    assert states == want
    assert want == states
    assert states != want[::-1]
    assert (len(states), states[4], states[-3:]) == (len(want), want[4], want[-3:])
    assert repr(states) == repr(want)
    assert hash(states) == hash(want)
    assert pickle.loads(pickle.dumps(states)) == copy.deepcopy(states) == list(want)


@pytest.mark.parametrize(("present", "recomputed", "want"), WANT)
def test_counting_tokens_by_state_spells_none_of_them_out(
    present: set[ChunkKey], recomputed: Sequence[int], want: tuple[State, ...]
) -> None:
    states = TokenStates(make_request(present), recomputed)
    counts = {state: states.count(state) for state in State}
    assert "_spelled" not in vars(states)
    assert counts == {state: Counter(want)[state] for state in State}
    for other in ("exact", "reused", "recomputed", "computed", "lost", 7):
        assert states.count(other) == want.count(other), "as a tuple counts"


def test_a_chunk_has_the_recomputed_tokens_that_stand_in_it() -> None:
    request = make_request({A, C, D})
    tiers = {A: "host", C: "disk", D: "host"}
    records = chunk_records(request, (5, 7, 8, 9), tiers, {B: Reason.CORRUPT}, {})
    assert [(r.start, r.num_tokens, r.state) for r in records] == [
        (2, 2, E), (4, 1, N), (5, 3, R), (8, 2, R),
    ]  # fmt: skip
    assert [(r.recomputed, r.tier, r.why) for r in records] == [
        (0, "host", None), (0, None, "corrupt"), (2, "disk", None), (2, "host", None),
    ]  # fmt: skip
    (_, told, *_) = chunk_records(request, (), tiers, {}, {1: "slow tier"})
    (_, silent, *_) = chunk_records(request, (), tiers, {}, {})
    assert (told.why, silent.why) == ("slow tier", "not asked for")
