"""Whether the books of a store and its parts balance. For tests at rest: no load, no write pending.

Each raises AssertionError where they do not.
"""

from kvweave.kv.format.memory import Arena
from kvweave.kv.store import KVStore
from kvweave.kv.tier_slot import TierBudget
from kvweave.kv.tiers.host import HostTier


def check_store(store: KVStore) -> None:
    """Check that books and tiers agree."""
    store._release_orphans()
    with store.inventory.lock:
        for slot in store.inventory.slots:
            if slot.budget is None or not slot.is_booked:
                continue
            check_budget(slot.budget)
            listed = {found.key for found in slot.tier.scan()}
            lost = [key for key in slot.budget if key not in listed]
            assert not lost, f"{slot.name} lost {len(lost)} objects that are in its books"
        host = store.inventory.host
        if host is not None:
            check_host(host.tier)
            kept = sum(1 for _ in host.tier.scan())
            assert kept == len(host.budget), "the host tier has objects off the books"
        users = [reads.arrival.record.users for reads in store._active._joinable.values()]
        assert all(num > 0 for num in users), "an arrival without users"


def check_budget(budget: TierBudget) -> None:
    entries = [budget._entries[key] for key in budget]
    total = sum(entry.size_bytes for entry in entries)
    assert total == budget.used_bytes, f"entries take {total} bytes, books say {budget.used_bytes}"
    assert budget.reserved_bytes >= 0, f"{budget.reserved_bytes} bytes reserved"
    taken = budget.used_bytes + budget.reserved_bytes
    assert taken <= budget.capacity_bytes, f"{taken} of {budget.capacity_bytes} bytes taken"
    assert len(budget._ranking) == len(entries), "ranked and kept differ"
    assert all(entry.pins >= 0 for entry in entries), "negative pins"


def check_host(tier: HostTier) -> None:
    with tier._lock:
        check_arena(tier._arena)


def check_arena(arena: Arena) -> None:
    """Check that holes and taken runs tile the arena exactly, and that no two holes touch."""
    at = 0
    for start, size in sorted([*arena._holes, *arena._taken.items()]):
        assert start == at, f"arena has a gap or an overlap at {at}"
        at = start + size
    assert at == arena.capacity_bytes, f"arena ends at {at}, not {arena.capacity_bytes}"
    for (start, size), (after, _) in zip(arena._holes, arena._holes[1:], strict=False):
        assert start + size < after, f"holes at {start} and {after} touch"
