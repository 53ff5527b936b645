"""What an option costs, in seconds to the first token, from measured profiles.

Bytes arrive layer by layer while layers before them compute.

That is the least it can take. What is paid is more, by the share of loading that nothing hides
(`loading_cost.py` has both). Bytes from a tier behind host memory load twice: into it, and from
there to the device.

    price = max(done, work + share · load)
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvweave.errors import ConfigError
from kvweave.kv.tree.node import DEVICE, HOST
from kvweave.plan.loading_cost import UNCHECKED, LinkArrival, Load, LoadPipe
from kvweave.plan.profile import MachineProfile, TierLink, tier_of


class Price(NamedTuple):
    """Seconds to the first token, and which link they wait for to the end."""

    seconds: float
    compute_s: float  # of it, were nothing to be waited for
    waits_for: str | None  # the link that is slower than compute
    load: Load | None = None  # what of it is loading; None: nothing is loaded


class SlowestLoad(NamedTuple):
    """The load that is paid for longest, of several."""

    link: str
    load_s: float  # by itself
    share: float
    paid_s: float


class LoadSet(NamedTuple):
    """Stored tokens and how they come: the same for every option that computes with them."""

    num_tokens: int  # of the hits among them
    loads: Mapping[str, int]  # by link, exact parts included
    num_bytes: int
    slowest: SlowestLoad | None
    pipe: LoadPipe


@dataclass(frozen=True, slots=True)
class StrategyInfo:
    """What the planner must know of a fusion strategy. Plain data: `fuse` fills it in."""

    name: str
    variants: tuple[str, ...] = ("isolated",)  # encoding contexts it can use, best first
    needs: frozenset[str] = frozenset()  # what a stored chunk must come with, such as "anchors"
    selection_bytes_per_token: float = 0.0  # bytes per stored token before rows are known
    extra_bytes_per_token: float = 0.0  # of these, what lies beside the layers (anchor copies)
    probe_layers: int = 0  # layers the question runs through before rows are known
    score_s_per_token: float = 0.0  # scoring, per stored token
    full_width_layers: float = 0.0  # layers that all tokens run through (selection inside the pass)
    waits_for_all: bool = False  # rows are known only when every layer has arrived
    depth: float = 1.0  # layers that a recomputed row runs through, as a share of all
    shares: bool = False  # reads chunks that lie on the device where they are: nothing is brought


def row_budget(num_hit_tokens: int, ratio: float) -> int:
    """Rows a ratio stands for: at least one where there is anything to recompute."""
    if num_hit_tokens == 0 or ratio <= 0:
        return 0
    rows = int(ratio * num_hit_tokens + 1e-9)
    return 1 if rows < 1 else min(rows, num_hit_tokens)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Prices of one machine. Pure; cheap enough to be asked a hundred times per request."""

    profile: MachineProfile
    pending: Mapping[str, int] = field(default_factory=dict)  # bytes others wait for, by tier
    shares: Mapping[str, float] = field(default_factory=dict)  # of loading paid for, by link

    def __post_init__(self) -> None:
        if self.profile.num_layers < 1:
            raise ConfigError(f"a profile needs layers, got {self.profile.num_layers}")

    def full(self, total: int) -> Price:
        compute_s = self.profile.prefill.at(0, total)
        return Price(compute_s, compute_s, None)

    def prefix(self, exact: int, total: int, loads: Mapping[str, int]) -> Price:
        """`exact` tokens in front, of which `loads` bytes come over each link."""
        compute_s = self.profile.prefill.at(exact, total - exact)
        if not loads:
            return Price(compute_s, compute_s, None)
        least_s, waits_for = self.pipe(loads).done(0.0, compute_s)
        return self._price_with_load(least_s, compute_s, waits_for, self.slowest(loads))

    def fused_price(
        self,
        strategy: StrategyInfo,
        recompute_s: float,
        total: int,
        question: int,
        loaded: LoadSet,
    ) -> Price:
        """Price a prompt of `total` tokens of which some rows are computed in `recompute_s`, and
        the rest is taken from `loaded`, which has what the strategy reads beside the layers among
        its bytes."""
        profile = self.profile
        compute_s = recompute_s
        if strategy.full_width_layers:
            compute_s += self.full_width_s(strategy, total)
        probed_s = profile.unpriced_s
        work_s = compute_s + probed_s
        if strategy.probe_layers:
            share = strategy.probe_layers / profile.num_layers
            probe_s = share * profile.recompute.at(total, question)
            probed_s += probe_s
            work_s += probe_s
        start_s, evidence_s, slow = probed_s, 0.0, None
        if strategy.waits_for_all or strategy.selection_bytes_per_token:
            evidence_s, slow = self._evidence(strategy, loaded)
            if evidence_s > probed_s:
                start_s = evidence_s
        if strategy.score_s_per_token:
            score_s = strategy.score_s_per_token * loaded.num_tokens
            start_s += score_s
            work_s += score_s
        least_s, waits_for = loaded.pipe.done(start_s, compute_s)
        if strategy.waits_for_all and evidence_s > probed_s:
            waits_for = slow
        return self._price_with_load(least_s, work_s, waits_for, loaded.slowest)

    def full_width_s(self, strategy: StrategyInfo, total: int) -> float:
        """Computing the layers that all tokens run through."""
        layer_s = self.profile.prefill.at(0, total) / self.profile.num_layers
        return strategy.full_width_layers * layer_s

    def shares_at(self, now_s: float, busy: bool = False) -> dict[str, float]:
        """By link, what requests over it paid for their loading lately. `busy`: beside others; as
        far as those did not tell, what the ones that were alone did."""
        shares = {}
        for name, link in self.profile.links.items():
            share = link.paid.share(_default_share(name), now_s)
            shares[name] = link.paid_beside.share(share, now_s) if busy else share
        return shares

    def can_load(self, link: str) -> bool:
        """Whether its speed is known. `link` as `link_name` gives it. What lies on the device does
        not travel."""
        return link == DEVICE or self.profile.link(link) is not None

    def load_set(
        self, hit_tokens: int, loads: Mapping[str, int], extra_bytes_per_token: float = 0.0
    ) -> LoadSet:
        """Return some hits and how they come, for `fused_price`. Of their bytes so many are no part
        of a layer and come before all of them."""
        pipe = self.pipe(loads, extra_bytes_per_token * hit_tokens)
        return LoadSet(hit_tokens, loads, sum(loads.values()), self.slowest(loads), pipe)

    def pipe(self, loads: Mapping[str, int], ahead_bytes: float = 0.0) -> LoadPipe:
        """`ahead_bytes` of `loads` are no part of a layer and come before all of them."""
        num_layers = self.profile.num_layers
        ahead_share = min(1.0, ahead_bytes / max(1, sum(loads.values()))) if ahead_bytes else 0.0
        arrivals = []
        for name, size_bytes in loads.items():
            if not size_bytes:
                continue
            link = self._link(name)
            ahead = ahead_share * size_bytes
            layer_s = link.latency_s + (size_bytes - ahead) / num_layers / link.bytes_per_s
            pending = self._pending(name)
            ready_s = (pending + ahead) / link.bytes_per_s
            arrivals.append(LinkArrival(name, ready_s, layer_s, pending > 0))
        return LoadPipe(num_layers, tuple(arrivals))

    def load(self, name: str, size_bytes: int) -> tuple[float, float]:
        """Seconds of a load by itself, to where it is computed with, and the share paid for."""
        if name == DEVICE:
            return 0.0, 0.0
        link = self._link(name)
        load_s = (self._pending(name) + size_bytes) / link.bytes_per_s
        load_s += self.profile.num_layers * link.latency_s
        host = self.profile.links.get(HOST)
        if host is not None and link is not host:
            load_s += size_bytes / host.bytes_per_s
        share = self.shares.get(name)
        if share is None:
            share = self.shares.get(tier_of(name))
        return load_s, _default_share(name) if share is None else share

    def slowest(self, loads: Mapping[str, int]) -> SlowestLoad | None:
        """The load that is paid for longest: tiers load together. None: nothing is loaded."""
        found: SlowestLoad | None = None
        for name, size_bytes in loads.items():
            if size_bytes:
                load_s, share = self.load(name, size_bytes)
                if found is None or share * load_s > found.paid_s:
                    found = SlowestLoad(name, load_s, share, share * load_s)
        return found

    def _price_with_load(
        self, least_s: float, work_s: float, waits_for: str | None, slowest: SlowestLoad | None
    ) -> Price:
        """The price of what overlaps here, from that of perfect overlap."""
        if slowest is None:
            return Price(least_s, work_s, waits_for)
        link, load_s, share, paid_s = slowest
        seconds = max(least_s, work_s + paid_s)
        return Price(seconds, work_s, waits_for, Load(link, load_s, share, work_s, least_s))

    def _link(self, name: str) -> TierLink:
        link = self.profile.links.get(name) or self.profile.link(name)
        assert link is not None, "can_load was asked before"
        return link

    def _pending(self, name: str) -> int:
        """Bytes that stand before ours: all codecs of a tier share its bandwidth."""
        return self.pending.get(tier_of(name), 0) if self.pending else 0

    def _evidence(self, strategy: StrategyInfo, loaded: LoadSet) -> tuple[float, str | None]:
        """When what the selector looks at has arrived, and over which link if that is all of it."""
        if strategy.waits_for_all:
            return loaded.pipe.done(0.0, 0.0)
        wanted = strategy.selection_bytes_per_token * loaded.num_tokens
        total, arrived_s = loaded.num_bytes, 0.0
        for name, size_bytes in loaded.loads.items() if wanted and total else ():
            if size_bytes:
                link = self._link(name)
                ahead_bytes = self._pending(name) + wanted * size_bytes / total
                arrived_s = max(arrived_s, link.latency_s + ahead_bytes / link.bytes_per_s)
        return arrived_s, None


def _default_share(link: str) -> float:
    """Copies from host memory need no thread of the host: they are hidden until seen otherwise."""
    return 0.0 if tier_of(link) == HOST else UNCHECKED
