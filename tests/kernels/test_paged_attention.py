"""Keys in pages are the same keys."""

import torch

from kvweave.kernels.attention import Segment, attend
from kvweave.kernels.paged_attention import PagedSegment, attend_paged


def test_pages_in_any_order_give_what_one_piece_gives() -> None:
    k, v = torch.randn(2, 21, 2, 16)
    pool_k, pool_v = torch.full((2, 9, 8, 2, 16), torch.nan)
    table = [7, 2, 4]
    for pool, x in ((pool_k, k), (pool_v, v)):
        for j, page in enumerate(table):
            part = x[8 * j : 8 * j + 8]
            pool[page, : len(part)] = part
    positions = torch.tensor([3, 8, 20])
    q = torch.randn(3, 6, 16)
    found = attend_paged(q, positions, [PagedSegment(0, 3, table)], pool_k, pool_v)
    torch.testing.assert_close(found, attend(q, positions, [Segment(0, 3, k, v)]))
