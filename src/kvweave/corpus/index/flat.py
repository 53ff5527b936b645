"""Compares the query with every vector: exact, no training, the yardstick for the others."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from kvweave.corpus.index.base import (
    Hits,
    Ids,
    Vector,
    Vectors,
    check_query,
    exact_top,
    merge,
    nothing,
)
from kvweave.corpus.index.rows import Rows

if TYPE_CHECKING:
    import faiss

# FAISS multiplies several rows at once; portions that start at a multiple of this get the same
# rounding as one pass over everything.
ALIGN = 64


class FlatIndex:
    """A FAISS flat index. Stages are equal portions of the vectors, in order of arrival."""

    kind = "flat"
    shared = False
    learns_from_first_add = False

    def __init__(
        self, dim: int, *, faiss_index: "faiss.IndexFlatIP | None" = None, rows: Rows | None = None
    ) -> None:
        import faiss

        self.dim = dim
        self.faiss_index = faiss.IndexFlatIP(dim) if faiss_index is None else faiss_index
        self.rows = rows or Rows()

    def __len__(self) -> int:
        return len(self.rows)

    def ids(self) -> Ids:
        return self.rows.live_ids

    def add(self, ids: Ids, vectors: Vectors) -> None:
        fresh = self.rows.unseen(ids)
        self.faiss_index.add(np.ascontiguousarray(vectors[fresh], np.float32))
        self.rows.append(ids[fresh])

    def remove(self, ids: Ids) -> None:
        self.rows.bury(ids)

    @property
    def wants_rebuild(self) -> bool:
        return self.rows.too_many_dead

    def search(self, vector: Vector, k: int) -> Hits:
        query = check_query(vector, self.dim, k)
        return self._portion(query, k, 0, self.rows.num_rows)

    def search_staged(self, vector: Vector, k: int, stages: int) -> Iterator[Hits]:
        query = check_query(vector, self.dim, k, stages)
        size = max(ALIGN, -(-self.rows.num_rows // (stages * ALIGN)) * ALIGN)
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

    def _portion(self, query: Vectors, k: int, start: int, end: int) -> Hits:
        """The best k of rows [start, end)."""
        import faiss

        end = min(end, self.rows.num_rows)
        if start >= end:
            return nothing()
        all_vectors = faiss.rev_swig_ptr(self.faiss_index.get_xb(), self.rows.num_rows * self.dim)
        part = all_vectors.reshape(-1, self.dim)[start:end]  # [end - start, D], a view

        def find(n: int) -> Hits:
            scores, rows = faiss.knn(query, part, n, metric=faiss.METRIC_INNER_PRODUCT)
            live = ~self.rows.dead[start + rows[0]]
            return Hits(self.rows.by_row[start + rows[0][live]], scores[0][live])

        return exact_top(find, k, end - start)
