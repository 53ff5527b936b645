"""The options of a request, each priced: exact prefix, and fused behind it; and what the store has
of a prompt's chunks, as strategies can use it.

Where a tier is slow, single chunks are computed instead of loaded. Which: those nearest behind the
exact prefix, because computed there they are exact too and push the frontier of exactness on. Where
loading and computing add up, because nothing hides the loading, there is no best mixture of the
two: of each tier it is all chunks or none, and which can be said from a few numbers per tier,
before any option is priced.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kvweave.kv.tree.node import DEVICE
from kvweave.plan.cost import CostModel, LoadSet, Price, StrategyInfo, row_budget
from kvweave.plan.plan import Layout, Option, Span, SpanKind, Stored, as_computed
from kvweave.plan.profile import link_name
from kvweave.reasons import Reason

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


MAX_TIERS = 4  # that are looked at for chunks to compute instead
MIN_HIT_TOKENS = 256  # fewer stored tokens are not worth an approximation


class Candidate(NamedTuple):
    """An option, and the spans it means: laid out for the one that is taken, not for all."""

    option: Option
    spans: Callable[[], tuple[Span, ...]]
    strategy: str | None = None


def price_prefix(costs: CostModel, layout: Layout) -> list[Candidate]:
    """The exact prefix, as much of it as is faster to load than to compute; [] if there is none."""
    exact = [layout.preamble] if layout.preamble.kind is SpanKind.EXACT else []
    if not exact:
        return []
    exact.extend(layout.path)
    if layout.first is not None and layout.first.kind is SpanKind.EXACT:
        exact.append(layout.first)
    price, end = _best_end(costs, layout, exact)
    tokens = sum([span.num_tokens for span in exact[:end]])
    load_bytes = sum([span.load_bytes for span in exact[:end]])
    rows = layout.total - tokens
    option = Option("prefix", price.seconds, rows, load_bytes, Reason.CHEAPEST, load=price.load)
    return [Candidate(option, lambda: _prefix_spans(layout, exact[:end]))]


def _best_end(costs: CostModel, layout: Layout, exact: Sequence[Span]) -> tuple[Price, int]:
    """Return how many of the exact spans to take, which may be cut anywhere, and the price."""
    on_device = 1  # without the preamble it would be full prefill
    while on_device < len(exact) and not exact[on_device].load_bytes:
        on_device += 1
    best: tuple[Price, int] | None = None
    for end in range(on_device, len(exact) + 1):
        kept = exact[:end]
        tokens = sum([span.num_tokens for span in kept])
        price = costs.prefix(tokens, layout.total, loads_of(kept))
        if best is None or price.seconds <= best[0].seconds:
            best = price, end
    assert best is not None, "the part on the device is always a choice"
    return best


def _prefix_spans(layout: Layout, kept: Sequence[Span]) -> tuple[Span, ...]:
    spans = list(kept)
    spans.extend(as_computed(span, Reason.TIER_TOO_SLOW) for span in layout.path[len(kept) - 1 :])
    start = sum(span.num_tokens for span in spans)
    skip = 1 if kept and kept[-1].reason is Reason.FIRST else 0
    for place in range(skip, len(layout.behind)):
        reason = Reason.NOT_EXACT if layout.stored[place] else Reason.NOT_STORED
        if place == 0 and layout.first is not None and layout.first.kind is SpanKind.FUSED:
            reason = Reason.ROUNDED
        spans.append(layout.computed_part(place, start, reason, True))
        start += layout.behind[place].num_tokens
    return (*spans, layout.question(True))


def price_fused(
    costs: CostModel,
    layout: Layout,
    hits: StoredHits,
    strategy: StrategyInfo,
    ratio: float,
) -> Candidate | Reason:
    """Exact prefix, then stored chunks with some rows recomputed. A Reason: declined."""
    if hits.num_tokens < MIN_HIT_TOKENS:
        return _why_few(layout, hits)

    paid = ratio * strategy.depth  # a row that leaves early is paid for as a part of one
    total, question = layout.total, layout.question_tokens
    computed_hits, loaded, recompute_s = work_of(costs, hits, total, paid)
    best = costs.fused_price(strategy, recompute_s, total, question, loaded)
    if best.waits_for is not None and (best.load is None or best.load.share < 1):

        def price(computed_hits: frozenset[int]) -> Price:
            """With these hits computed instead of loaded."""
            loaded = loaded_without(costs, hits, computed_hits)
            rows_s = costs.profile.recompute.at(total, num_rows(hits, loaded, paid))
            return costs.fused_price(strategy, rows_s, total, question, loaded)

        computed_hits, best = _computed_instead(price, best, hits.links, computed_hits)
        loaded = loaded_without(costs, hits, computed_hits)
    num_loaded = len(hits.links) - len(computed_hits)
    if not num_loaded:
        return Reason.TIER_TOO_SLOW
    rows = num_rows(hits, loaded, ratio)
    num_chunks = len(layout.path) + len(layout.behind) - layout.num_history
    mixed = num_loaded + bool(layout.first) < num_chunks
    name = f"{'mixed' if mixed else 'fused'} {strategy.name}"
    cost = (best.seconds, rows, loaded.num_bytes)
    option = Option(name, *cost, Reason.CHEAPEST, ratio, best.load)
    return Candidate(option, lambda: _fused_spans(layout, hits, computed_hits), strategy.name)


def _computed_instead(
    price: Callable[[frozenset[int]], Price],
    best: Price,
    links: Mapping[int, str],
    chosen: frozenset[int],
) -> tuple[frozenset[int], Price]:
    """Which hits to compute rather than load: those of a tier that compute would wait for.

    `links`: how each hit comes, in the order of the prompt; `chosen` are computed anyway, at the
    price `best`. The more are computed, the less is loaded: the best number is where the two cross,
    found by halving. Where loading is not hidden the two add up, and there is no crossing to find.
    """
    for _ in range(MAX_TIERS):
        slow = best.waits_for
        if slow is None or (best.load is not None and best.load.share >= 1):
            break
        here = [i for i, link in links.items() if link == slow and i not in chosen]
        if not here:
            break
        low, high = 1, len(here)  # with none of them computed it is slow, as just seen
        tried = {0: best}
        while low < high:
            middle = (low + high) // 2
            tried[middle] = price(chosen.union(here[:middle]))
            if tried[middle].waits_for == slow:
                low = middle + 1
            else:
                high = middle
        if low not in tried:
            tried[low] = price(chosen.union(here[:low]))
        num = min(tried, key=lambda n: tried[n].seconds)
        if num == 0:
            break
        chosen, best = chosen.union(here[:num]), tried[num]
    return chosen, best


def _why_few(layout: Layout, hits: StoredHits) -> Reason:
    copies = zip(hits.usable, layout.stored, strict=True)
    if any(copy is None and stored for copy, stored in copies):
        return Reason.NEEDS_MISSING
    if any(hits.usable) and not any(hits.loadable):
        return Reason.TIER_UNKNOWN
    return Reason.TOO_FEW_HITS


def _fused_spans(
    layout: Layout, hits: StoredHits, computed_hits: frozenset[int]
) -> tuple[Span, ...]:
    spans = [layout.preamble, *layout.path]
    sizes = {i: size_bytes for i, _, _, size_bytes in hits.parts}
    start = sum(span.num_tokens for span in spans)
    frontier = True  # everything so far is exact
    for i, chunk in enumerate(layout.behind):
        copy = hits.loadable[i]
        if i == 0 and layout.first is not None:
            spans.append(layout.first)
            frontier = layout.first.exact_after
        elif copy is not None and i not in computed_hits:
            frontier = False
            spans.append(
                Span(
                    SpanKind.FUSED,
                    start,
                    chunk.num_tokens,
                    chunk.id,
                    Reason.STORED,
                    copy.tier,
                    sizes[i],
                    copy.variant,
                    copy.codec,
                    layout.is_in_history(i),
                )
            )
        else:
            reason = Reason.TIER_TOO_SLOW if copy is not None else Reason.NOT_STORED
            if copy is None and hits.usable[i] is not None:
                reason = Reason.TIER_UNKNOWN
            elif copy is None and layout.stored[i]:
                reason = Reason.NEEDS_MISSING
            spans.append(layout.computed_part(i, start, reason, frontier))
        start += chunk.num_tokens
    return (*spans, layout.question(frontier))
