"""CRAFT's rule of what may enter the tree, for comparison: the product's tree judges by rank."""

from collections.abc import Sequence

from kvweave.kv.tree.node import ChunkRef
from kvweave.plan.ordering import AccessTable

MIN_USES = 2  # in the window, before a chunk may take room in the tree


def num_worth_keeping(
    order: Sequence[ChunkRef], matched: int, table: AccessTable, min_uses: int = MIN_USES
) -> int:
    """How many chunks of an order may be in the tree: the matched ones and, behind them, a run of
    chunks that were each retrieved `min_uses` times. Ask after `AccessTable.push`."""
    end = matched
    while end < len(order) and table.count(order[end].id) >= min_uses:
        end += 1
    return end
