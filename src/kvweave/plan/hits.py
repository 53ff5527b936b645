"""What the store has of a prompt's chunks, as strategies can use it."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from kvweave.plan.cost import CostModel, LoadSet, StrategyInfo
from kvweave.plan.layout import Layout, Stored
from kvweave.plan.load_or_compute import UnhiddenLink, too_slow_links, unhidden_links
from kvweave.plan.plan import Span
from kvweave.plan.profile import link_name

NONE: frozenset[int] = frozenset()


class StoredHits(NamedTuple):
    """What the store has for strategies of one kind. The same for all that want the same copies."""

    usable: tuple[Stored | None, ...]  # per chunk behind the path
    loadable: tuple[Stored | None, ...]  # of these, where the tier's speed is known
    parts: tuple[tuple[int, int, str, int], ...]  # chunk, tokens, link, bytes of each hit
    num_tokens: int
    links: dict[int, str]  # of each hit
    loads: dict[str, int]  # bytes per link with every hit loaded, exact parts included
    rows_besides: int  # tokens that are neither exact nor hits
    extra_bytes: float  # per token, of what lies beside the layers
    unhidden: tuple[UnhiddenLink, ...]  # links whose loading nothing hides
    known: dict[frozenset[int], LoadSet]  # what is loaded without these, for all strategies
    instead: dict[float, frozenset[int]]  # by ratio, hits of links that are too slow


def find_hits(costs: CostModel, layout: Layout, strategy: StrategyInfo) -> StoredHits:
    """Which stored chunks a strategy can use."""
    usable = [_usable(copies, strategy) if copies else None for copies in layout.stored]
    loadable: list[Stored | None] = [None] * len(usable)
    first = layout.first
    loads = loads_of([layout.preamble, *layout.path, *([first] if first else [])])
    parts: list[tuple[int, int, str, int]] = []
    tokens: dict[str, int] = {}  # by link
    extra_bytes = strategy.extra_bytes_per_token
    for i, copy in enumerate(usable):
        if copy is None:
            continue
        link = copy.link
        if link not in tokens and not costs.can_load(link):
            continue
        loadable[i] = copy
        if i == 0 and first is not None:
            continue
        size = layout.behind[i].num_tokens
        size_bytes = copy.size_bytes + int(extra_bytes * size)
        parts.append((i, size, link, size_bytes))
        tokens[link] = tokens.get(link, 0) + size
        loads[link] = loads.get(link, 0) + size_bytes
    exact = layout.exact_tokens + (first.num_tokens if first else 0)
    num_tokens = sum(tokens.values())
    rows_besides = layout.total - exact - num_tokens
    return StoredHits(
        tuple(usable),
        tuple(loadable),
        tuple(parts),
        num_tokens,
        {i: link for i, _, link, _ in parts},
        loads,
        rows_besides,
        extra_bytes,
        unhidden_links(costs, layout.total, rows_besides, tokens, loads),
        {},
        {},
    )


def hits_to_compute(hits: StoredHits, ratio: float, tried: Collection[str] = ()) -> frozenset[int]:
    """Hits that are computed, because loading takes longer and nothing hides it. Those of the links
    in `tried` are loaded whatever it takes."""
    if not hits.unhidden:
        return NONE
    instead = hits.instead.get(ratio)
    if instead is None:
        slow = too_slow_links(hits.unhidden, ratio)
        instead = frozenset([i for i, link in hits.links.items() if link in slow] if slow else ())
        hits.instead[ratio] = instead
    return frozenset(i for i in instead if hits.links[i] not in tried) if tried else instead


def loaded_without(costs: CostModel, hits: StoredHits, computed_hits: frozenset[int]) -> LoadSet:
    """What is loaded with these hits computed instead."""
    known = hits.known.get(computed_hits)
    if known is None:
        tokens, loads = hits.num_tokens, dict(hits.loads)
        for i, num_tokens, link, size_bytes in hits.parts if computed_hits else ():
            if i in computed_hits:
                tokens -= num_tokens
                loads[link] -= size_bytes
        known = hits.known[computed_hits] = costs.loaded(tokens, loads, hits.extra_bytes)
    return known


def _usable(copies: Sequence[Stored], strategy: StrategyInfo) -> Stored | None:
    for variant in strategy.variants:
        for copy in copies:
            if copy.variant == variant and strategy.needs <= copy.has:
                return copy
    return None


def loads_of(spans: Sequence[Span]) -> dict[str, int]:
    """Bytes by link."""
    loads: dict[str, int] = {}
    for span in spans:
        if span.load_bytes:
            link = link_name(span.tier, span.codec)
            loads[link] = loads.get(link, 0) + span.load_bytes
    return loads
