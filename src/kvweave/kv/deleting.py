"""Deleting chunk KV from every tier, with what is on its way there or from there.

By key, for whoever knows the keys; by chunk, for what somebody else has deleted.
"""

from collections.abc import Callable, Collection, Iterable

from kvweave.kv.keys import ChunkKey
from kvweave.kv.provenance import Provenance, carries
from kvweave.kv.stock import Stock
from kvweave.kv.tier_lookup import Locator
from kvweave.kv.under_way import UnderWay


class Deleting:
    """The part of a store that deletes. Any thread. Blocks on IO."""

    def __init__(self, stock: Stock, under_way: UnderWay, locator: Locator) -> None:
        self._stock = stock
        self._lock = stock.lock
        self._under_way = under_way
        self._locator = locator

    def delete(self, keys: Iterable[ChunkKey]) -> int:
        """Remove chunks from every tier; leased copies go when their lease does, and so does what
        a load under way brings. Blocks on IO.

        Returns how many of the keys some tier had. A tier that fails is counted.
        """
        had = 0
        for key in dict.fromkeys(keys):
            found = [self._delete_at_hand(key)]  # from now on nothing is written down
            for writer in self._stock.writers.values():
                writer.forget(key)
            self._locator.forget(key)
            found += [self._stock.delete_from(place, key) for place in self._stock.below]
            found.append(self._delete_at_hand(key))  # what a lower tier still gave meanwhile
            had += any(found)
        return had

    def keys_at_hand(self, is_wanted: Callable[[Provenance], bool]) -> list[ChunkKey]:
        """What the host tier has of some provenance. Looks at every object there."""
        return [key for key, of in self._stock.provenances() if is_wanted(of)]

    def forget(self, chunk_ids: Collection[str] | None) -> int:
        """Somebody else deleted the KV of these chunks, or is about to: remove what the host tier
        has, what this process has written below, and all that was computed behind them. Loads serve
        their leases, and nothing is kept of what those under way bring, nor of what later ones find
        where it was not deleted yet. Blocks on IO; returns as `delete` does.

        None: nobody can say which chunks. Then it is those that do not exist (`know_by`).
        """
        gone = self._stock.gone
        with self._lock:
            gone.add(chunk_ids)
            self._under_way.disown_all()  # nobody knows yet whose text they bring
            found = self._stock.written()
        found += self._stock.provenances()
        if chunk_ids is None:
            names = {name for _, of in found for name in (of.chunk, *of.behind)}
            chunk_ids = names.difference(gone.known(names))
        is_wanted = carries(chunk_ids)
        return self.delete(key for key, of in found if is_wanted(of))

    def know_by(self, known: Callable[[Collection[str]], Collection[str]]) -> None:
        """`known` says which of some chunks exist: what is loaded of those is kept, whatever was
        forgotten before. Called on any thread; may block."""
        self._stock.gone.known = known

    def _delete_at_hand(self, key: ChunkKey) -> bool:
        """Remove a chunk from the host tier, and see to it that no load under way brings it back.
        True: the host tier had it."""
        with self._lock:
            self._under_way.disown(key)
            return self._stock.delete_from_host(key)
