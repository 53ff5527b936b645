"""Sorts vectors into clusters and searches the nearest few: fast for many vectors."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from kvweave.corpus.index.base import (
    Ids,
    IndexHits,
    Vector,
    Vectors,
    check_query,
    exact_top,
    merge,
    nothing,
    one_thread,
)
from kvweave.corpus.index.rows import IndexRows

if TYPE_CHECKING:
    import faiss

POINTS_PER_CLUSTER = 39  # what k-means in FAISS asks for at least
GROWTH = 4  # retrain when there are this many times the vectors it was trained on
PROBE_SHARE = 1 / 8  # of the clusters, in a plain search …
MIN_PROBES = (
    192  # … but at least so many: 94 of 756 lost 1.4 points of recall@5, bench/retrieval.py
)


class IvfIndex:
    """A FAISS IVF index. Stages are slices of the probed clusters, nearest first.

    The first `add` trains it, so that first batch should be a fair sample, or everything.
    """

    kind = "ivf"
    shared = False
    learns_from_first_add = True

    def __init__(
        self,
        dim: int,
        *,
        faiss_index: "faiss.IndexIVFFlat | None" = None,
        rows: IndexRows | None = None,
        num_trained: int = 0,
    ) -> None:
        self.dim = dim
        self.faiss_index = faiss_index
        self.rows = rows or IndexRows()
        self.num_trained = num_trained

    def __len__(self) -> int:
        return len(self.rows)

    def ids(self) -> Ids:
        return self.rows.live_ids

    def add(self, ids: Ids, vectors: Vectors) -> None:
        fresh = self.rows.unseen(ids)
        ids, vectors = ids[fresh], np.ascontiguousarray(vectors[fresh], np.float32)
        if not len(ids):
            return
        if self.faiss_index is None:
            self.faiss_index = self._train(vectors)
            self.num_trained = len(vectors)
        self.faiss_index.add(vectors)
        self.rows.append(ids)

    def remove(self, ids: Ids) -> None:
        self.rows.bury(ids)

    @property
    def wants_rebuild(self) -> bool:
        grown = self.rows.num_rows > GROWTH * max(self.num_trained, POINTS_PER_CLUSTER)
        return grown or self.rows.too_many_dead

    @property
    def num_probes(self) -> int:
        """Clusters that a plain search visits."""
        if self.faiss_index is None:
            return 0
        num_clusters = int(self.faiss_index.nlist)
        return min(num_clusters, max(MIN_PROBES, round(num_clusters * PROBE_SHARE)))

    def search(self, vector: Vector, k: int) -> IndexHits:
        *_, final = self.search_staged(vector, k, 1)
        return final

    def search_staged(self, vector: Vector, k: int, stages: int) -> Iterator[IndexHits]:
        query = check_query(vector, self.dim, k, stages)
        best = nothing()
        if self.faiss_index is None:
            yield best
            return
        with one_thread():
            distances, clusters = self.faiss_index.quantizer.search(query, self.num_probes)
        for probes in np.array_split(np.arange(self.num_probes), self.num_stages(k, stages)):
            best = merge(best, self._probe(query, k, distances, clusters, probes), k)
            yield best

    def num_stages(self, k: int, stages: int) -> int:
        return max(1, min(stages, self.num_probes))

    def _probe(
        self, query: Vectors, k: int, distances: Vectors, clusters: Ids, probes: Ids
    ) -> IndexHits:
        """The best k within some of the clusters, given by their places in `clusters`."""
        import faiss

        index = self.faiss_index
        assert index is not None, "probing before training"
        keys = np.ascontiguousarray(clusters[:, probes])
        near = np.ascontiguousarray(distances[:, probes])
        settings = faiss.SearchParametersIVF(nprobe=len(probes))
        available = sum(index.invlists.list_size(int(key)) for key in keys[0] if key >= 0)

        def find(n: int) -> IndexHits:
            scores, rows = np.empty((1, n), np.float32), np.empty((1, n), np.int64)
            # The Python wrapper fixes nprobe for the whole index; searches here run side by side.
            with one_thread():
                index.search_preassigned_c(
                    1,
                    faiss.swig_ptr(query),
                    n,
                    faiss.swig_ptr(keys),
                    faiss.swig_ptr(near),
                    faiss.swig_ptr(scores),
                    faiss.swig_ptr(rows),
                    False,
                    settings,
                )
            real = rows[0] >= 0
            found = rows[0][real]
            live = ~self.rows.dead[found]
            return IndexHits(self.rows.by_row[found[live]], scores[0][real][live])

        return exact_top(find, k, available) if available else nothing()

    def _train(self, vectors: Vectors) -> "faiss.IndexIVFFlat":
        import faiss

        wanted = int(4 * math.sqrt(len(vectors)))
        num_clusters = max(1, min(wanted, len(vectors) // POINTS_PER_CLUSTER))
        quantizer = faiss.IndexFlatIP(self.dim)
        index = faiss.IndexIVFFlat(quantizer, self.dim, num_clusters, faiss.METRIC_INNER_PRODUCT)
        index.cp.min_points_per_centroid = 1  # small knowledge bases are fine, no warning needed
        index.train(vectors)
        return index
