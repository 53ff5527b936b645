"""The VectorIndex contract, held against every index we ship. A new one is a new line here."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.corpus.index import VectorIndex, make_index
from kvweave.corpus.index.base import Ids, Vector, Vectors
from kvweave.errors import RequestError

KINDS = ["flat", "ivf", "hnsw", ":memory:"]
DIM = 8


def make(kind: str) -> VectorIndex:
    return make_index(kind, DIM, collection="test")


def make_vectors(num: int, seed: int, *, twins: bool = True) -> Vectors:
    """Unit vectors. With `twins` half of them are copies of others: equal scores everywhere."""
    rng = np.random.default_rng(seed)
    vectors = rng.standard_normal((num, DIM)).astype(np.float32)
    if twins and num > 4:
        vectors[num // 2 :] = vectors[rng.integers(0, num // 4, num - num // 2)]
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def filled(kind: str, num: int, seed: int = 0) -> tuple[VectorIndex, Ids, Vectors]:
    index, ids = make(kind), np.arange(1, num + 1, dtype=np.int64) * 3
    vectors = make_vectors(num, seed)
    index.add(ids, vectors)
    return index, ids, vectors


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(
    num=st.integers(0, 700),
    k=st.integers(1, 20),
    stages=st.integers(1, 9),
    dead_share=st.sampled_from([0.0, 0.2, 0.9]),
    seed=st.integers(0, 10_000),
)
def test_a_staged_search_ends_with_what_a_plain_search_returns(
    kind: str, num: int, k: int, stages: int, dead_share: float, seed: int
) -> None:
    if kind == ":memory:":
        num = min(num, 60)
    index, ids, vectors = filled(kind, num, seed)
    rng = np.random.default_rng(seed)
    dead = ids[rng.random(num) < dead_share]
    index.remove(dead)
    queries = [make_vectors(1, seed + 1)[0], *vectors[:2]]
    for query in queries:
        plain = index.search(query, k)
        staged = list(index.search_staged(query, k, stages))
        assert 1 <= len(staged) == index.num_stages(k, stages) <= stages
        assert staged[-1].ids.tolist() == plain.ids.tolist()
        assert staged[-1].scores.tolist() == plain.scores.tolist()
        assert not set(plain.ids.tolist()) & set(dead.tolist())
        for hits in staged:
            order = list(zip((-hits.scores).tolist(), hits.ids.tolist(), strict=True))
            assert order == sorted(order)


@pytest.mark.parametrize("kind", ["flat", "ivf", "hnsw"])
def test_staged_equals_plain_to_the_last_bit_for_real_sizes(kind: str) -> None:
    """Wide vectors: here the order in which a sum is taken shows."""
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((3000, 384)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    index = make_index(kind, 384, collection="test")
    index.add(np.arange(1, 3001, dtype=np.int64), vectors)
    for query in vectors[:40] + 0.5 * vectors[40:80]:
        plain = index.search(query, 10)
        for stages in (2, 3, 8):
            *_, final = index.search_staged(query, 10, stages)
            assert final.ids.tolist() == plain.ids.tolist()
            assert final.scores.tolist() == plain.scores.tolist()


@pytest.mark.parametrize("stages", [2, 8])
def test_a_staged_walk_compares_at_most_half_as_often_again_as_a_plain_one(stages: int) -> None:
    import faiss

    rng = np.random.default_rng(0)
    centres = rng.standard_normal((60, 48)).astype(np.float32)
    vectors = centres[rng.integers(0, 60, 3000)] + 0.7 * rng.standard_normal((3000, 48))
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    index = make_index("hnsw", 48, collection="test")
    index.add(np.arange(1, 3001, dtype=np.int64), vectors)
    counts = faiss.cvar.hnsw_stats

    def compared(search: Callable[[Vector], object]) -> int:
        counts.reset()
        for query in vectors[:40] + vectors[40:80]:
            search(query)
        return int(counts.ndis)

    plain = compared(lambda query: index.search(query, 5))
    staged = compared(lambda query: list(index.search_staged(query, 5, stages)))
    assert plain < staged < 1.5 * plain


@pytest.mark.parametrize("kind", KINDS)
def test_a_vector_finds_itself_until_it_is_removed(kind: str) -> None:
    index, ids, vectors = make(kind), np.arange(1, 51, dtype=np.int64), make_vectors(50, 3)
    index.add(ids[:25], vectors[:25])
    index.add(ids[25:], vectors[25:])
    query, twins = vectors[7], {i + 1 for i in range(50) if np.allclose(vectors[i], vectors[7])}
    assert set(index.search(query, len(twins)).ids.tolist()) == twins
    index.remove(np.array(sorted(twins)))
    assert twins.isdisjoint(index.search(query, 50).ids.tolist())
    assert len(index) == 50 - len(twins)
    assert set(index.ids().tolist()) == set(ids.tolist()) - twins


@pytest.mark.parametrize("kind", KINDS)
def test_adding_or_removing_twice_changes_nothing(kind: str) -> None:
    index, ids, vectors = filled(kind, 40)
    index.add(ids[20:], vectors[20:])
    index.remove(np.array([3, 3000], np.int64))
    index.remove(np.array([3], np.int64))
    assert index.ids().tolist() == ids[1:].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_index_finds_nothing(kind: str) -> None:
    index = make(kind)
    query = make_vectors(1, 0)[0]
    assert len(index) == 0
    assert index.search(query, 3).ids.tolist() == []
    assert [hits.ids.tolist() for hits in index.search_staged(query, 3, 4)][-1] == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_query_of_another_width_or_no_k_is_refused(kind: str) -> None:
    index, _, _ = filled(kind, 5)
    with pytest.raises(RequestError, match="dimensions"):
        index.search(np.zeros(DIM + 1, np.float32), 3)
    with pytest.raises(RequestError, match="k and stages"):
        index.search(np.zeros(DIM, np.float32), 0)


@settings(max_examples=40, deadline=None)
@given(num=st.integers(1, 500), k=st.integers(1, 30), seed=st.integers(0, 10_000))
def test_flat_is_the_exact_answer_with_ties_by_id(num: int, k: int, seed: int) -> None:
    index, ids, vectors = filled("flat", num, seed)
    query = vectors[seed % num]
    scores = vectors @ query
    hits = index.search(query, k)
    np.testing.assert_allclose(hits.scores, np.sort(scores)[::-1][:k], atol=1e-5)
    # vectors that are copies of each other come in order of their ids
    twins = [i for i in ids.tolist() if np.array_equal(vectors[i // 3 - 1], query)]
    found = [i for i in hits.ids.tolist() if i in twins]
    assert found == sorted(twins)[: len(found)]


@pytest.mark.parametrize("kind", ["flat", "ivf", "hnsw"])
def test_many_tombstones_ask_for_a_rebuild(kind: str) -> None:
    index, ids, _ = filled(kind, 200)
    index.remove(ids[:40])
    assert not index.wants_rebuild
    index.remove(ids[:60])
    assert index.wants_rebuild


def test_ivf_asks_for_a_rebuild_when_it_outgrows_its_training() -> None:
    index, ids, _ = filled("ivf", 200)
    index.add(ids[-1] + np.arange(1, 700, dtype=np.int64), make_vectors(699, 9))
    assert index.wants_rebuild
