"""A prompt of the small fusion world in pages, computed slice by slice as the engine does it."""

from torch import Tensor

from kvweave.engine.progress import SparseRows
from kvweave.fuse.prepared import prepare
from kvweave.fuse.stitched import stitch
from kvweave.fuse.strategy import Strategy
from kvweave.model.decoder import Decoder
from kvweave.model.paged_kv import KVPool, PagedKV
from kvweave.model.rows import EarlyExit, Rows
from worlds.fuse import Prefilled, World

PAGES = 18  # of one prompt, if no more is asked for


class InPages:
    """A prepared prompt in pages of a pool, computed slice by slice."""

    def __init__(
        self,
        world: World,
        name: Strategy | str,
        ratio: float,
        pool: KVPool,
        first: int,
        pages: int = PAGES,
    ) -> None:
        strategy = world.strategy(name) if isinstance(name, str) else name
        self.kv = PagedKV(pool, range(first, first + pages))
        stitched = stitch(world.decoder, world.request, world.prefix, world.source, self.kv)
        self.prepared = prepare(stitched, strategy, ratio)
        self.left = SparseRows(self.prepared.rows, self.prepared.bonds)
        self.ids = world.request.prompt_ids

    def rows(self, most: int) -> Rows:
        count = self.left.share(most)
        at, start = self.left.next(count), self.left.done
        self.left.done += count
        wanted = [] if self.left.left else [count - 1]
        hook = self.prepared.mover(start, start + count)
        staying = self.prepared.staying(start, start + count)
        early_exit = None if staying is None else EarlyExit(*staying)
        return Rows([self.ids[p] for p in at], at, self.kv, wanted, hook, early_exit)

    def result(self, logits: Tensor) -> Prefilled:
        layers = range(len(self.kv.pool.keys))
        keys, values = [self.kv.keys(i) for i in layers], [self.kv.values(i) for i in layers]
        return Prefilled(logits, keys, values)


def make_pool(decoder: Decoder) -> KVPool:
    return KVPool(decoder.spec, 256, 4, decoder.dtype, decoder.device)
