"""Compares the query with every vector: exact, no training, the yardstick for the others."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from kvweave.corpus.index.base import IndexHits, Vector, Vectors, check_query, merge, nothing
from kvweave.corpus.index.faiss_index import FaissIndex, exact_top, one_thread

EPSILON = 2.0**-24  # float32 rounding of one product of two unit vectors, per dimension


class FlatIndex(FaissIndex):
    """A FAISS flat index. Stages are equal portions of the vectors, in order of arrival."""

    kind = "flat"

    def _make(self) -> Any:
        import faiss

        return faiss.IndexFlatIP(self.dim)

    def search_staged(self, vector: Vector, k: int, stages: int) -> Iterator[IndexHits]:
        query = check_query(vector, self.dim, k, stages)
        size = self._portion_size(stages)
        best = nothing()
        start = 0
        for stage in range(stages):
            # the last portion takes what others added meanwhile
            end = self.rows.num_rows if stage == stages - 1 else start + size
            best = merge(best, self._portion(query, k, start, end), k)
            yield best
            start = end
            if start >= self.rows.num_rows:
                return

    def num_stages(self, k: int, stages: int) -> int:
        return max(1, -(-self.rows.num_rows // self._portion_size(stages)))

    def _portion_size(self, stages: int) -> int:
        return max(1, -(-self.rows.num_rows // stages))

    def _portion(self, query: Vectors, k: int, start: int, end: int) -> IndexHits:
        """The best k of rows [start, end).

        FAISS multiplies several rows at once, and how it groups them shows in the last bit. So it
        only proposes: the proposed rows are scored again one by one, whatever portion they are in.
        """
        import faiss

        end = min(end, self.rows.num_rows)
        if start >= end:
            return nothing()
        all_vectors = faiss.rev_swig_ptr(self.faiss_index.get_xb(), self.rows.num_rows * self.dim)
        part = all_vectors.reshape(-1, self.dim)[start:end]  # [end - start, D], a view

        def find(n: int) -> IndexHits:
            with one_thread():
                _, found = faiss.knn(query, part, n, metric=faiss.METRIC_INNER_PRODUCT)
            rows = found[0][~self.rows.dead[start + found[0]]]
            scores = (part[rows].astype(np.float64) * query[0]).sum(axis=1).astype(np.float32)
            return IndexHits(self.rows.by_row[start + rows], scores)

        return exact_top(find, k, end - start, tolerance=2 * self.dim * EPSILON)
