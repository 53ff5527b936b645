"""Open-loop load: requests come when they come, whether or not the server keeps up.

Every request has a thread of its own that reads its tokens as a client would. The time to the first
token counts from the moment the request was due, so a server that is behind cannot hide it.
"""

import random
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

LATE_SHARE = 0.05  # of the requests may miss the bound: it is one of the 95th percentile
FACTOR = 1.4  # between two rates while the limit is not enclosed yet

Serve = Callable[[int], Iterable[Any]]  # the tokens of a request, by its number in the stream


@dataclass(slots=True)
class Served:
    """One request as its client saw it. Seconds from the moment it was due."""

    number: int
    token_s: list[float] = field(default_factory=list)
    tokens: list[Any] = field(default_factory=list)
    error: str | None = None
    done: bool = False

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.token_s, self.token_s[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Probe:
    """What one rate gave."""

    rate: float  # requests per second, offered
    within: bool  # the bound was kept, and everything was answered
    cut_short: bool  # it was clear before the end that it was not
    span_s: float  # from the first arrival to the last token
    cpu_s: float  # of this process, server and clients
    served: tuple[Served, ...]

    def numbers(self) -> dict[str, Any]:
        answered = [one for one in self.served if one.token_s]
        firsts = [one.token_s[0] * 1e3 for one in answered]
        gaps = [gap * 1e3 for one in answered for gap in one.gaps_s]
        return {
            "rate": round(self.rate, 3),
            "within": self.within,
            "cut_short": self.cut_short,
            "requests": len(self.served),
            "completed_per_s": round(len(answered) / self.span_s, 3) if self.span_s else 0.0,
            "tokens_per_s": round(sum(len(o.tokens) for o in answered) / self.span_s, 2),
            "cpu_s_per_request": round(self.cpu_s / max(1, len(answered)), 3),
            "ttft_ms": {
                "mean": _rounded(statistics.fmean(firsts) if firsts else None),
                "p50": _rounded(percentile(firsts, 50)),
                "p95": _rounded(percentile(firsts, 95)),
            },
            "tbt_ms": {
                "mean": _rounded(statistics.fmean(gaps) if gaps else None),
                "p50": _rounded(percentile(gaps, 50)),
                "p95": _rounded(percentile(gaps, 95)),
            },
            "errors": [one.error for one in self.served if one.error is not None],
        }


def percentile(values: Sequence[float], percent: float) -> float | None:
    """With linear interpolation, so that few requests do not make steps of it."""
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def arrivals(rate: float, window_s: float, seed: int) -> list[float]:
    """A Poisson process of which is known how many come: as many as the rate says, at least one.
    In a short window the number would else say more than the rate."""
    drawn, num = random.Random(seed), max(1, round(rate * window_s))
    *at, end = accumulate(drawn.expovariate(1.0) for _ in range(num + 1))
    return [window_s * each / end for each in at]


def alone(serve: Serve, numbers: Sequence[int]) -> list[Served]:
    """One request after another: the unloaded server."""
    return [_client(serve, Served(number), time.perf_counter()) for number in numbers]


def probe(
    serve: Serve, rate: float, window_s: float, bound_s: float, numbers: Sequence[int], seed: int
) -> Probe:
    """Offer `rate` for `window_s` and wait for all answers. Ends early when the bound is lost."""
    due = arrivals(rate, window_s, seed)
    served = [Served(number) for number, _ in zip(numbers, due, strict=False)]
    assert len(served) == len(due), "the stream has too few requests for this rate"
    may_be_late = int(LATE_SHARE * len(due)) + 1
    started_s, cpu_s = time.perf_counter(), time.process_time()
    threads: list[threading.Thread] = []
    cut_short = False
    for one, at in zip(served, due, strict=True):
        while (wait_s := started_s + at - time.perf_counter()) > 0:
            time.sleep(min(wait_s, 0.1))
        now_s = time.perf_counter() - started_s
        if _late(served[: len(threads)], due, now_s, bound_s) > may_be_late:
            cut_short = True
            break
        threads.append(
            threading.Thread(target=_client, args=(serve, one, started_s + at), daemon=True)
        )
        threads[-1].start()
    for thread in threads:
        thread.join()
    begun, cpu_s = served[: len(threads)], time.process_time() - cpu_s
    span_s = max(
        (at + one.token_s[-1] for one, at in zip(begun, due, strict=False) if one.token_s),
        default=0.0,
    )
    p95 = percentile([one.token_s[0] for one in begun if one.token_s], 95)
    kept = p95 is not None and p95 <= bound_s and all(o.error is None and o.done for o in begun)
    return Probe(rate, kept and not cut_short, cut_short, span_s, cpu_s, tuple(begun))


def _late(served: Sequence[Served], due: Sequence[float], now_s: float, bound_s: float) -> int:
    waited = (
        one.token_s[0] if one.token_s else now_s - at for one, at in zip(served, due, strict=False)
    )
    return sum(seconds > bound_s for seconds in waited)


def _client(serve: Serve, one: Served, due_s: float) -> Served:
    try:
        for token in serve(one.number):
            one.token_s.append(time.perf_counter() - due_s)
            one.tokens.append(token)
        one.done = True
    except Exception as error:  # the bench goes on and reports it
        one.error = f"{type(error).__name__}: {error}"
    return one


def highest_rate(
    probe_at: Callable[[float], bool], start: float, most_probes: int, known_good: float = 0.0
) -> float:
    """The highest rate that kept the bound: enclose it, then halve the (geometric) gap."""
    good, bad, rate = known_good, float("inf"), start
    for _ in range(most_probes):
        if probe_at(rate):
            good = max(good, rate)
        else:
            bad = min(bad, rate)
        if bad == float("inf"):
            rate = good * FACTOR
        elif good == 0.0:
            rate = bad / FACTOR
        else:
            rate = (good * bad) ** 0.5
    return good
