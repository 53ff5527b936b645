"""Which replica a request goes to, and how the replicas are.

A request goes where it is through soonest: least tokens to compute, its own, less what probably
lies there already (`mirror.py`), and those of requests in front of it; among the replicas whose
load is within a factor of the mean. Of those that are alike in this, where most of it lies; and
what no replica holds goes by a hash of its first chunk, so that the same passages meet again
whichever gateway they come through.

    health.py looks at each ──► up, draining, down ─┐
    answers report failures ──► breaker ────────────┴─► who takes requests
"""

import hashlib
import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from kvweave.config import GatewaySettings
from kvweave.errors import UpstreamError
from kvweave.gateway.cards import UpstreamCard, read_card
from kvweave.gateway.connections import Exchange, UpstreamFailed, failure_of
from kvweave.gateway.mirror import MirrorMatch, PromptPart, path_keys
from kvweave.gateway.replica import Replica, ReplicaHealth, read_key, read_upstreams
from kvweave.metrics import Metrics, Sample

REFILL_S = 10.0  # in which an empty reserve is full again without any request


class RetryBudget:
    """How many retries there may be, so that a fleet in trouble is not asked twice as much. Any
    thread.

        each request            + share of a retry
        ten seconds             + the reserve
        at most                 the reserve
    """

    def __init__(
        self, share: float, reserve: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._share = share
        self._reserve = float(reserve)
        self._clock = clock
        self._lock = threading.Lock()
        self._left = float(reserve)
        self._seen_s = clock()

    def count_request(self) -> None:
        """A request came."""
        with self._lock:
            self._left = min(self._reserve, self._left + self._share)

    def take(self) -> bool:
        """Whether a retry may be made now; it counts if it may."""
        with self._lock:
            now_s = self._clock()
            refill = self._reserve * (now_s - self._seen_s) / REFILL_S
            self._seen_s, self._left = now_s, min(self._reserve, self._left + refill)
            if self._left < 1.0:
                return False
            self._left -= 1.0
            return True

    @property
    def left(self) -> float:
        """Retries that could be made at once."""
        with self._lock:
            return self._left


MOST_SILENT = 2  # looks in a row before a replica that says nothing is taken for dead
# Of a prompt: replicas that differ by less are alike, and one that holds no more than that beyond
# what all of them do is not worth going there: the hash decides then, which spreads what is new.
LEAST_SHARE = 0.1
FUSED_WORTH = 0.8  # of a token of chunk KV, in tokens of an exact prefix: some rows are recomputed


class RoutedPrompt(NamedTuple):
    """A prompt as routing sees it."""

    parts: tuple[PromptPart, ...]
    salt: bytes  # whose it is: tenants share nothing
    model: str = ""  # that shall answer it; "": whichever a replica has

    @property
    def num_tokens(self) -> int:
        return sum(part.num_tokens for part in self.parts)

    @property
    def root(self) -> bytes:
        """What its paths begin with."""
        return hashlib.blake2b(self.salt, key=self.model.encode()[:64], digest_size=16).digest()


class ReplicaLease:
    """A request's claim on a replica: say how it went, then `give_back`. Any thread."""

    def __init__(
        self, fleet: "Fleet", replica: Replica, match: MirrorMatch, to_compute: int
    ) -> None:
        self._fleet = fleet
        self.replica = replica
        assert replica.card is not None, "a replica without a card takes no requests"
        self.card: UpstreamCard = replica.card  # as it was: the replica's goes where that dies
        self.match = match
        self.to_compute = to_compute  # tokens, as far as is known
        self._is_prefilling = True
        self._is_back = False
        self._is_told = False  # the breaker knows how it went
        self._leased_s = time.perf_counter()

    @property
    def held_s(self) -> float:
        """How long ago it was taken."""
        return time.perf_counter() - self._leased_s

    def exchange(self, path: str, document: dict[str, object]) -> Exchange:
        """A request to it, which is cut should it die."""
        made = self.replica.connections.exchange("POST", path, document)
        self._fleet.add_exchange(self.replica, made)
        return made

    def first_token(self) -> None:
        """Its prompt is computed."""
        self._fleet.end_prefill(self)

    def record_success(self) -> None:
        self._is_told = True
        self.replica.breaker.record_success()
        self._fleet.count("answered", self.replica)

    def record_failure(self, failure: UpstreamFailed) -> None:
        """It did not answer. A replica that is busy or stopping is not broken."""
        if failure.status not in (429, 503):
            self._is_told = True
            self.replica.breaker.record_failure(str(failure))
        self._fleet.count("failed", self.replica)

    def give_back(self, exchange: Exchange | None = None) -> None:
        """Harmless the second time."""
        self._fleet.take_back(self, exchange)

    def end_prefill(self) -> bool:
        """Whether the prefill had not ended before. The fleet's lock is held."""
        was, self._is_prefilling = self._is_prefilling, False
        return was

    def end(self) -> bool:
        """Whether the lease had not ended before. The fleet's lock is held."""
        was, self._is_back = self._is_back, True
        if not was and not self._is_told:
            # or a replica whose probe was cut would rest for ever
            self.replica.breaker.record_no_result()
        return not was


class Fleet:
    """The replicas of one gateway. Any thread."""

    def __init__(self, cfg: GatewaySettings, metrics: Metrics | None = None) -> None:
        self.cfg = cfg
        self.metrics = metrics or Metrics()
        self.budget = RetryBudget(cfg.retry_share, cfg.retry_reserve)
        self._changed = threading.Condition()  # guards the replicas; never held for long
        key = read_key(cfg)
        self.replicas = [Replica(url, cfg, key) for url in read_upstreams(cfg)]
        self._next = 0  # round robin
        self._closed = False

    # ── requests ─────────────────────────────────────────────────────────────

    def lease(
        self,
        prompt: RoutedPrompt,
        *,
        tried: Collection[Replica] = (),
        first: Replica | None = None,
        may_wait: bool = True,
        is_off: Callable[[], bool] = lambda: False,
    ) -> ReplicaLease:
        """The replica for a prompt: `first` if it takes requests, else the best of those that were
        not `tried`, else any. Waits a while where none takes requests, until `is_off` says that
        nobody wants it any more. Raises UpstreamError."""
        give_up_s = time.monotonic() + (self.cfg.wait_s if may_wait else 0.0)
        paths = path_keys(prompt.root, prompt.parts)
        with self._changed:
            while True:
                if self._closed:
                    raise UpstreamError("the gateway is stopping; ask another one")
                for replica, match in self._rank(prompt, paths, tried, first):
                    if replica.breaker.allows():
                        replica.load += 1
                        replica.prefills += 1
                        to_compute = prompt.num_tokens - round(_worth(replica, match))
                        replica.backlog += to_compute
                        replica.mirror.record(paths, prompt.parts)
                        self._count_routed(replica, prompt, match)
                        return ReplicaLease(self, replica, match, to_compute)
                left_s = give_up_s - time.monotonic()
                if left_s <= 0 or is_off():
                    raise UpstreamError(self._none_left(prompt.model))
                # a breaker's rest ends without a word
                self._changed.wait(min(left_s, 0.1))

    def best_order(self, prompt: RoutedPrompt, parts: Sequence[PromptPart]) -> list[int]:
        """Places of `parts` on the longest path behind `prompt` that some replica holds."""
        path = path_keys(prompt.root, prompt.parts)[-1] if prompt.parts else prompt.root
        best: list[int] = []
        with self._changed:
            for replica in self.replicas:
                if replica.is_open and replica.has(prompt.model):
                    found = replica.mirror.order(path, parts)
                    best = max(best, found, key=lambda places: _tokens(parts, places))
        return best

    def holds(self, prompt: RoutedPrompt, parts: Sequence[PromptPart]) -> bool:
        """Whether some replica holds all of `prompt` with `parts` behind it."""
        path = path_keys(prompt.root, (*prompt.parts, *parts))[-1]
        with self._changed:
            return any(
                r.mirror.has(path) for r in self.replicas if r.is_open and r.has(prompt.model)
            )

    def pending_prefills(self) -> int:
        """Prompts that are being computed, on an average replica that takes requests."""
        with self._changed:
            open_ones = [replica for replica in self.replicas if replica.is_open]
            return sum(r.prefills for r in open_ones) // max(1, len(open_ones))

    def add_exchange(self, replica: Replica, exchange: Exchange) -> None:
        with self._changed:
            replica.exchanges.add(exchange)

    def end_prefill(self, lease: ReplicaLease) -> None:
        with self._changed:
            self._end_prefill(lease)

    def take_back(self, lease: ReplicaLease, exchange: Exchange | None) -> None:
        with self._changed:
            if exchange is not None:
                lease.replica.exchanges.discard(exchange)
            if lease.end():
                lease.replica.load -= 1
                self._end_prefill(lease)
                self._changed.notify_all()

    def _end_prefill(self, lease: ReplicaLease) -> None:
        if lease.end_prefill():
            lease.replica.prefills -= 1
            lease.replica.backlog -= lease.to_compute

    def count(self, outcome: str, replica: Replica) -> None:
        self.metrics.count("upstream_requests_total", upstream=replica.name, outcome=outcome)

    # ── replicas ─────────────────────────────────────────────────────────────

    def look(self, replica: Replica) -> None:
        """Ask a replica how it is. Blocks for as long as `health_s` says; the health thread's."""
        card, why = replica.card, None
        try:
            if card is None:  # its first word, or it was away and may have come back as another
                card = read_card(replica.connections, self.cfg.connector, self.cfg.health_s)
            status, told = replica.connections.get(card.health_path, self.cfg.health_s)
            seen = ReplicaHealth.UP
            if status >= 400:
                seen, why = ReplicaHealth.DRAINING, str(failure_of(replica.name, status, told))
        except UpstreamFailed as failure:
            seen, why = ReplicaHealth.DOWN, str(failure)
        self._saw(replica, card, seen, why)

    def is_any_unseen(self) -> bool:
        """Whether nothing is known of some replica yet, not even that it does not answer."""
        return any(replica.health is ReplicaHealth.UNKNOWN for replica in self.replicas)

    def card(self) -> UpstreamCard | None:
        """The card of the first replica that was seen and is not down; None: none is."""
        with self._changed:
            return next((r.card for r in self.replicas if r.card is not None), None)

    def can_fuse(self, model: str = "") -> bool:
        """Whether a replica that takes requests for a model reuses chunk KV."""
        with self._changed:
            return any(r.card.fuses for r in self.replicas if r.card is not None and r.has(model))

    def models(self) -> dict[str, int | None]:
        """What the replicas serve, or did when they were last seen, each with its context: the
        smallest, where several have it."""
        found: dict[str, int | None] = {}
        with self._changed:
            for replica in self.replicas:
                for name, most in replica.models.items():
                    known = [n for n in (most, found.get(name)) if n is not None]
                    found[name] = min(known, default=None)
        return found

    def why_unready(self) -> str | None:
        """Why no request would be answered now; None: some replica was well at the last look.
        Names none of them: whoever looks at /readyz has shown no key."""
        if any(replica.health is ReplicaHealth.UP for replica in self.replicas):
            return None
        return f"none of {len(self.replicas)} upstreams takes requests; see the gateway's log"

    def samples(self) -> list[Sample]:
        """For metrics."""
        with self._changed:
            for replica in self.replicas:
                name = replica.name
                self.metrics.gauge("upstream_up", replica.health is ReplicaHealth.UP, upstream=name)
                self.metrics.gauge("upstream_resting", replica.breaker.is_open, upstream=name)
                self.metrics.gauge("upstream_in_flight", replica.load, upstream=name)
                self.metrics.gauge(
                    "upstream_mirror_tokens", replica.mirror.num_tokens, upstream=name
                )
        self.metrics.gauge("upstream_retries_left", self.budget.left)
        return self.metrics.snapshot()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            exchanges = [e for replica in self.replicas for e in replica.exchanges]
            self._changed.notify_all()
        for exchange in exchanges:
            exchange.cut()
        for replica in self.replicas:
            replica.connections.close()

    # ── choosing; the lock is held ───────────────────────────────────────────

    def _rank(
        self,
        prompt: RoutedPrompt,
        paths: Sequence[bytes],
        tried: Collection[Replica],
        first: Replica | None,
    ) -> list[tuple[Replica, MirrorMatch]]:
        """Replicas that take requests, the best first."""
        open_ones = [r for r in self.replicas if r.is_open and r.has(prompt.model)]
        fresh = [replica for replica in open_ones if replica not in tried] or open_ones
        if not fresh:
            return []
        matches = {replica: replica.mirror.match(paths, prompt.parts) for replica in fresh}
        if first in fresh and not tried:
            ranked = sorted(fresh, key=lambda replica: replica is not first)
        else:
            ranked = self._by_routing(prompt, matches)
        return [(replica, matches[replica]) for replica in ranked]

    def _by_routing(
        self, prompt: RoutedPrompt, matches: dict[Replica, MirrorMatch]
    ) -> list[Replica]:
        if self.cfg.routing == "round_robin":
            self._next += 1
            at, replicas = self._next % len(matches), list(matches)
            return [*replicas[at:], *replicas[:at]]
        if self.cfg.routing == "least_loaded":
            return sorted(matches, key=lambda replica: replica.load)
        return self._by_content(prompt, matches)

    def _by_content(
        self, prompt: RoutedPrompt, matches: dict[Replica, MirrorMatch]
    ) -> list[Replica]:
        """Replicas within the bounded load first; of these the soonest; of those about as soon the
        one that holds most; then by the hash."""
        mean = (sum(replica.load for replica in matches) + 1) / len(matches)
        most = math.ceil(self.cfg.load_factor * mean)
        worth = {replica: _worth(replica, match) for replica, match in matches.items()}
        slack = LEAST_SHARE * prompt.num_tokens
        least = min(worth.values()) + slack
        # tokens until it would be computed there; what all share of the prompt does not matter
        work = {replica: replica.backlog - worth[replica] for replica in matches}
        soon = min(work[r] for r in matches if r.load < most) + slack
        home = _home(prompt)

        def rank(replica: Replica) -> tuple[bool, bool, float, bytes]:
            gain = worth[replica] if worth[replica] >= least else 0.0
            weight = hashlib.blake2b(replica.name.encode(), key=home, digest_size=8).digest()
            return replica.load >= most, work[replica] > soon, -gain, weight

        return sorted(matches, key=rank)

    def _count_routed(self, replica: Replica, prompt: RoutedPrompt, match: MirrorMatch) -> None:
        name = replica.name
        self.metrics.count("upstream_prompt_tokens_total", prompt.num_tokens, upstream=name)
        self.metrics.count("upstream_matched_tokens_total", match.exact, kind="exact")
        self.metrics.count("upstream_matched_tokens_total", match.chunks, kind="chunk")

    def _saw(
        self, replica: Replica, card: UpstreamCard | None, seen: ReplicaHealth, why: str | None
    ) -> None:
        """Take in what a look found."""
        cut: list[Exchange] = []
        with self._changed:
            was = replica.health
            replica.silent_looks = replica.silent_looks + 1 if seen is ReplicaHealth.DOWN else 0
            if (
                seen is ReplicaHealth.DOWN
                and was is ReplicaHealth.UP
                and replica.silent_looks < MOST_SILENT
            ):
                return  # once is a hiccup
            replica.health, replica.card, replica.why = seen, card, why
            if card is not None:
                replica.models = card.models
            if seen is ReplicaHealth.DOWN:
                # whatever comes back is asked anew what it is, and holds nothing
                replica.card = None
                replica.mirror.forget()
                cut = list(replica.exchanges)
            self._changed.notify_all()
        if seen is not was:
            self.metrics.count("upstream_changes_total", upstream=replica.name, to=str(seen))
        if seen is ReplicaHealth.DOWN:
            replica.connections.drop_idle()
        for exchange in cut:  # they would wait for it for long; others can answer them
            exchange.cut()

    def _none_left(self, model: str) -> str:
        """That no replica takes requests, and how each is that might."""
        of = f" for model {model!r}" if model else ""
        told = "; ".join(replica.words for replica in self.replicas if replica.has(model))
        return f"no upstream takes requests{of}: {told}"


def _worth(replica: Replica, match: MirrorMatch) -> float:
    fuses = replica.card is not None and replica.card.fuses
    return match.exact + (FUSED_WORTH * match.chunks if fuses else 0.0)


def _home(prompt: RoutedPrompt) -> bytes:
    """What prompts that should meet have in common: the first chunk, else the first parts."""
    first = next((part.key for part in prompt.parts if part.is_chunk), None)
    if first is None:
        first = b"".join(part.key for part in prompt.parts[:2])
    return hashlib.blake2b(first + prompt.salt, digest_size=16).digest()


def _tokens(parts: Sequence[PromptPart], places: Sequence[int]) -> int:
    return sum(parts[place].num_tokens for place in places)
