"""What the store has of a prompt's chunks, as strategies can use it, and what is worth loading.

Where loading and computing add up, because nothing hides the loading, there is no best mixture of
the two: of each tier it is all chunks or none, and which can be said from a few numbers per tier,
before any option is priced.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvweave.kv.tree.node import DEVICE
from kvweave.plan.cost import CostModel, LoadSet, StrategyInfo, row_budget
from kvweave.plan.layout import Layout
from kvweave.plan.plan import Span, Stored
from kvweave.plan.profile import link_name

NONE: frozenset[int] = frozenset()


class UnhiddenLink(NamedTuple):
    """A link whose loading nothing hides. Tiers load together: without the slowest, the next one is
    waited for, and what computing saves is the difference."""

    times: float  # what is saved by not loading, over computing every row of it
    link: str
    num_tokens: int
    paid_s: float  # for loading


def unhidden_links(
    costs: CostModel, total: int, rows: int, tokens: Mapping[str, int], loads: Mapping[str, int]
) -> tuple[UnhiddenLink, ...]:
    """What loading costs that nothing hides, the slowest link first. `rows` are computed anyway."""
    paid = []
    for link in tokens:
        seconds, share = costs.load(link, loads[link])
        if share >= 1:
            paid.append((share * seconds, link))
    if not paid:
        return ()
    paid.sort(reverse=True)
    recompute, num_tokens = costs.profile.recompute, sum(tokens.values())
    rows_s = recompute.at(total, rows + num_tokens) - recompute.at(total, rows)
    row_s = max(1e-12, rows_s / num_tokens)
    nexts = [*(paid_s for paid_s, _ in paid[1:]), 0.0]
    return tuple(
        UnhiddenLink((paid_s - next_s) / (tokens[link] * row_s), link, tokens[link], paid_s)
        for (paid_s, link), next_s in zip(paid, nexts, strict=True)
    )


def too_slow_links(links: Sequence[UnhiddenLink], ratio: float) -> set[str]:
    """Links whose hits are computed, because loading them takes longer. `links` slowest first."""
    found = set()
    for each in links:
        if each.times <= 1 - ratio:
            break
        found.add(each.link)
    return found


class FusedWork(NamedTuple):
    """What strategies that pay for the same ratio load and compute, as far as no tier is waited
    for."""

    computed_hits: frozenset[int]  # computed rather than loaded
    loaded: LoadSet
    recompute_s: float  # of all rows


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
    works: dict[float, FusedWork]  # by the ratio that is paid for


def find_hits(costs: CostModel, layout: Layout, strategy: StrategyInfo) -> StoredHits:
    """Which stored chunks a strategy can use."""
    first, behind = layout.first, layout.behind
    usable: list[Stored | None] = [None] * len(behind)
    loadable = usable.copy()
    exact_parts = [layout.preamble, *layout.path, *([first] if first else [])]
    loads = loads_of(exact_parts)
    parts: list[tuple[int, int, str, int]] = []
    tokens: dict[str, int] = {}  # by link
    extra_bytes = strategy.extra_bytes_per_token
    for i, copies in enumerate(layout.stored):
        if not copies:
            continue
        copy = usable[i] = _usable(copies, strategy)
        if copy is None:
            continue
        link = copy.link
        if link not in tokens and not costs.can_load(link):
            continue
        loadable[i] = copy
        if i == 0 and first is not None:
            continue
        size, size_bytes = behind[i].num_tokens, copy.size_bytes
        if extra_bytes:
            size_bytes += int(extra_bytes * size)
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


def work_of(costs: CostModel, hits: StoredHits, total: int, paid: float) -> FusedWork:
    """What is loaded and computed at a ratio that is paid for."""
    work = hits.works.get(paid)
    if work is None:
        computed_hits = _hits_to_compute(hits, paid)
        loaded = loaded_without(costs, hits, computed_hits)
        recompute_s = costs.profile.recompute.at(total, num_rows(hits, loaded, paid))
        work = hits.works[paid] = FusedWork(computed_hits, loaded, recompute_s)
    return work


def num_rows(hits: StoredHits, loaded: LoadSet, ratio: float) -> int:
    """Tokens that are computed, `ratio` of the loaded ones among them."""
    tokens = loaded.num_tokens
    return hits.rows_besides + hits.num_tokens - tokens + row_budget(tokens, ratio)


def _hits_to_compute(hits: StoredHits, ratio: float) -> frozenset[int]:
    """Hits that are computed, because loading takes longer and nothing hides it."""
    slow = too_slow_links(hits.unhidden, ratio) if hits.unhidden else ()
    if not slow:
        return NONE
    return frozenset([i for i, link in hits.links.items() if link in slow])


def loaded_without(costs: CostModel, hits: StoredHits, computed_hits: frozenset[int]) -> LoadSet:
    """What is loaded with these hits computed instead."""
    known = hits.known.get(computed_hits)
    if known is None:
        tokens, loads = hits.num_tokens, dict(hits.loads)
        for i, num_tokens, link, size_bytes in hits.parts if computed_hits else ():
            if i in computed_hits:
                tokens -= num_tokens
                loads[link] -= size_bytes
        known = hits.known[computed_hits] = costs.load_set(tokens, loads, hits.extra_bytes)
    return known


def _usable(copies: Sequence[Stored], strategy: StrategyInfo) -> Stored | None:
    needs = strategy.needs
    for variant in strategy.variants:
        for copy in copies:
            if copy.variant != variant or (copy.tier == DEVICE and not strategy.shares):
                continue
            if not needs or needs <= copy.has:
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
