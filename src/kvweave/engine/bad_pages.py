"""Pages that hold what is no number: memory that went bad, or that a failing device wrote.

Nothing checks the bytes of a device before they are read, and one bad row makes every answer over
it fail, for all who share it. So when an answer fails that way, what it read is looked at.
"""

from collections.abc import Sequence

import torch

from kvweave.kernels.host import on_device
from kvweave.model.paged_kv import KVPool


def has_bad_rows(pool: KVPool, pages: Sequence[int], num_rows: int) -> bool:
    """Whether any of the first `num_rows` rows of these pages holds a value that is no number, in
    any layer. Waits for the device."""
    at = on_device(torch.tensor(pages), pool.keys.device)
    for part in (pool.keys, pool.values):
        for layer in part:  # one by one: a gather of all would want as much memory again
            rows = layer.index_select(0, at).flatten(0, 1)[:num_rows]  # [num_rows, Hk, D]
            if not bool(rows.isfinite().all()):
                return True
    return False


def is_bad_chunk(pool: KVPool, pages: Sequence[int], num_tokens: int) -> bool:
    """Whether the pages of a shared chunk hold values that are no numbers. Codes of 8 bits always
    are numbers, so their scales are checked."""
    if pool.codes(0) is None:
        return has_bad_rows(pool, pages, num_tokens)
    at = on_device(torch.tensor(pages), pool.keys.device)
    for layer in range(len(pool.keys)):
        coded = pool.codes(layer)
        assert coded is not None, "all layers are coded, or none"
        scales = coded.scales.index_select(0, at).transpose(1, 2).flatten(0, 1)[:num_tokens]
        if not bool(scales.isfinite().all()):
            return True
    return False
