"""Where a chunk's KV is: in the books, on its way, or where only a tier can tell."""

from collections.abc import Sequence

from kvweave.kv.keys import ChunkKey
from kvweave.kv.places import TierSlot
from kvweave.kv.residency import Miss, Peek, Residency
from kvweave.kv.stock import Stock
from kvweave.kv.tier_budget import TierEntry
from kvweave.kv.tier_lookup import Located, Locator
from kvweave.kv.under_way import UnderWay


class Finder:
    """Changes nothing. Any thread; the stock's lock is taken where it is not said to be held."""

    def __init__(self, stock: Stock, locator: Locator, under_way: UnderWay) -> None:
        self._stock = stock
        self._lock = stock.lock
        self._locator = locator
        self._under_way = under_way

    def peek_books(self, key: ChunkKey) -> Peek | None:
        """What the books say; None where only a tier could tell."""
        with self._lock:
            place, entry = self.find(key, {})
            if place is not None and entry is not None:
                return Peek(Residency.HERE, place.name, entry.size_bytes)
            arriving_from = self._under_way.tier_of(key)
            if arriving_from is not None:
                return Peek(Residency.ARRIVING, arriving_from, None)
        return None

    def unknown(self, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        """Those that `peek_books` has no answer for."""
        with self._lock:
            found = {key: self.find(key, {})[0] or self._under_way.tier_of(key) for key in keys}
        return [key for key, where in found.items() if where is None]

    def locate(self, keys: Sequence[ChunkKey]) -> dict[ChunkKey, Located]:
        """Ask the tiers for what is not in the books. The deleted that only await their last lease
        are not looked for: their bytes are still there."""
        shelves = [place.shelf for place in self._stock.places if place.shelf is not None]
        with self._lock:
            entries = {key: [shelf.find(key) for shelf in shelves] for key in keys}
            foreign = frozenset(self._stock.foreign)
        doomed = {k for k, found in entries.items() if any(e and e.doomed for e in found)}
        wanted = [key for key in keys if key not in doomed]
        return self._locator.locate(self._stock.below, wanted, foreign)

    def find(
        self, key: ChunkKey, located: dict[ChunkKey, Located]
    ) -> tuple[TierSlot | None, TierEntry | None]:
        """Fastest tier in working order that has a key, with its entry if that tier keeps a shelf.
        Lock is held."""
        for place in self._stock.places:
            entry = place.shelf.get(key) if place.shelf is not None else None
            if entry is None or place.reads.is_open or (place.name, key) in self._stock.foreign:
                continue
            return place, entry
        return (located[key].place, None) if key in located else (None, None)

    def why_absent(self, key: ChunkKey) -> Miss:
        """Lock is held."""
        for place in self._stock.places:
            if place.reads.is_open and (place.shelf is None or key in place.shelf):
                return Miss.TIER_FAILED
        return Miss.ABSENT
