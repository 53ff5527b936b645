"""Sorts vectors into clusters and searches the nearest few: fast for many vectors."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvweave.corpus.index.base import Ids, IndexHits, Vector, Vectors, check_query, merge, nothing
from kvweave.corpus.index.faiss_index import FaissIndex, exact_top, one_thread

POINTS_PER_CLUSTER = 39  # what k-means in FAISS asks for at least
GROWTH = 4  # retrain when there are this many times the vectors it was trained on
PROBE_SHARE = 1 / 8  # of the clusters, in a plain search …
# … but at least so many: 94 of 756 lost 1.4 points of recall@5, bench/retrieval.py
MIN_PROBES = 192


class IvfIndex(FaissIndex):
    """A FAISS IVF index. Stages are slices of the probed clusters, nearest first.

    The first `add` trains it, so that first batch should be a fair sample, or everything.
    """

    kind = "ivf"
    learns_from_first_add = True

    def add(self, ids: Ids, vectors: Vectors) -> None:
        if self.faiss_index is None and len(ids):
            self.faiss_index, self.num_trained = self._train(vectors), len(vectors)
        super().add(ids, vectors)

    @property
    def wants_rebuild(self) -> bool:
        is_outgrown = self.rows.num_rows > GROWTH * max(self.num_trained, POINTS_PER_CLUSTER)
        return is_outgrown or super().wants_rebuild

    @property
    def num_probes(self) -> int:
        """Clusters that a plain search visits."""
        if self.faiss_index is None:
            return 0
        num_clusters = int(self.faiss_index.nlist)
        return min(num_clusters, max(MIN_PROBES, round(num_clusters * PROBE_SHARE)))

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

    def _train(self, vectors: Vectors) -> Any:
        import faiss

        wanted = int(4 * math.sqrt(len(vectors)))
        num_clusters = max(1, min(wanted, len(vectors) // POINTS_PER_CLUSTER))
        quantizer = faiss.IndexFlatIP(self.dim)
        index = faiss.IndexIVFFlat(quantizer, self.dim, num_clusters, faiss.METRIC_INNER_PRODUCT)
        index.cp.min_points_per_centroid = 1  # small knowledge bases are fine, no warning needed
        index.train(np.ascontiguousarray(vectors, np.float32))
        return index
