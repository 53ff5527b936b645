"""What the store has of a prompt's chunks, as strategies can use it."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvweave.plan.cost import CostModel, Slowest, StrategyInfo
from kvweave.plan.dear import Dear, dear_links
from kvweave.plan.layout import Layout, Stored
from kvweave.plan.plan import Span
from kvweave.plan.profile import link_name


class Loaded(NamedTuple):
    """What is loaded, once it is known which hits are computed instead."""

    num_tokens: int  # of the hits that are loaded
    loads: Mapping[str, int]
    num_bytes: int
    slowest: Slowest | None


class Hits(NamedTuple):
    """What the store has for strategies of one kind. The same for all that want the same copies."""

    usable: tuple[Stored | None, ...]  # per chunk behind the path
    loadable: tuple[Stored | None, ...]  # of these, where the tier's speed is known
    parts: tuple[tuple[int, int, str, int], ...]  # chunk, tokens, link, bytes of each hit
    num_tokens: int
    links: dict[int, str]  # of each hit
    loads: dict[str, int]  # bytes per link with every hit loaded, exact parts included
    rows_besides: int  # tokens that are neither exact nor hits
    dear: tuple[Dear, ...]  # links whose loading is not hidden
    known: dict[frozenset[int], Loaded]  # what is loaded without these, for all strategies


def find_hits(costs: CostModel, layout: Layout, strategy: StrategyInfo) -> Hits:
    """Which stored chunks a strategy can use."""
    usable = tuple(_usable(copies, strategy) for copies in layout.stored)
    loadable = tuple(copy if copy and costs.can_load(copy.link) else None for copy in usable)
    first = layout.first
    loads = loads_of([layout.preamble, *layout.path, *([first] if first else [])])
    parts: list[tuple[int, int, str, int]] = []
    tokens: dict[str, int] = {}  # by link
    for i in range(1 if first else 0, len(loadable)):
        copy = loadable[i]
        if copy is not None:
            size = layout.behind[i].num_tokens
            link = copy.link
            size_bytes = copy.size_bytes + int(strategy.extra_bytes_per_token * size)
            parts.append((i, size, link, size_bytes))
            tokens[link] = tokens.get(link, 0) + size
            loads[link] = loads.get(link, 0) + size_bytes
    exact = layout.exact_tokens + (first.num_tokens if first else 0)
    num_tokens = sum(tokens.values())
    rows_besides = layout.total - exact - num_tokens
    links = {i: link for i, _, link, _ in parts}
    dear = dear_links(costs, layout.total, rows_besides, tokens, loads)
    return Hits(usable, loadable, tuple(parts), num_tokens, links, loads, rows_besides, dear, {})


def loaded_without(costs: CostModel, hits: Hits, computed_hits: frozenset[int]) -> Loaded:
    """What is loaded with these hits computed instead."""
    known = hits.known.get(computed_hits)
    if known is None:
        tokens, loads = hits.num_tokens, dict(hits.loads)
        for i, num_tokens, link, size_bytes in hits.parts if computed_hits else ():
            if i in computed_hits:
                tokens -= num_tokens
                loads[link] -= size_bytes
        known = Loaded(tokens, loads, sum(loads.values()), costs.slowest(loads))
        hits.known[computed_hits] = known
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
