"""What loading costs a request: how it overlaps with compute at best, and what is really paid.

At best, layers arrive while those before them compute (`LoadPipe`):

    done = start;  for each layer: ready += latency + bytes/bandwidth;  done = max(done, ready) + c

With equal layers that is the largest of three straight lines per link, so a price costs a few
multiplications instead of a loop over layers. What depends on the bytes alone is worked out once
and asked for with every option.

Reading, copying and computing at once should therefore cost the longest of them. On real machines
readers and the thread that orders the pass take cores from each other, and a request pays for most
of its loading as if nothing overlapped. How much of it is its share, learnt from requests
(`PaidShares`):

    took = work + share · load        0: all hidden, 1: nothing hidden, more: slower than measured

A tier starts at `UNCHECKED`, dearer than no overlap at all, so that the first choice already holds.
Then the last requests say what it is. Of five the second highest counts: one outlier, such as a
first request that compiles kernels, changes nothing; two slow loads count at once; four fast ones
are believed.

A share that makes every plan compute gets no new observations. So it is forgotten: every `FORGET_S`
without one the highest is dropped, and once all are, what stands for the unknown is halved, until
loading is tried again. After a clock was set back, the age of a share cannot be told: all of them
are forgotten at once.

Alone, a request computes while its layers come. Beside others it gets all its bytes first, and what
that took is known though its steps were shared: work + what it waited for bytes. Two numbers, so a
link has two `PaidShares`.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

UNCHECKED = 1.25  # of a tier that no request has told about
WINDOW = 5  # requests that are remembered
MOST = 10.0  # a load that took longer says nothing more: a stall, not a pace
LEAST_LOAD = 0.1  # of the work: below that the work's own error would be taken for the load's
FORGET_S = 1800.0


class Load(NamedTuple):
    """The load that a price holds, apart from the rest of it."""

    link: str  # of several, the one that is paid for longest
    seconds: float  # by itself, to where it is computed with, as the link has been lately
    share: float  # of them that the price holds
    work_s: float  # all else: choosing rows and computing
    least_s: float  # the whole price, were all of the load hidden that can be

    @property
    def tells(self) -> bool:
        """Whether what the request takes will say what was paid for the load."""
        return self.seconds > LEAST_LOAD * self.work_s


@dataclass(slots=True)
class PaidShares:
    """The shares that the last requests over one link paid. For one thread at a time."""

    shares: list[float] = field(default_factory=list)  # newest last
    at_s: float = 0.0  # Unix time of the newest, or since when the link is known; 0: not known

    def share(self, unchecked: float, now_s: float) -> float:
        """What the next request should expect. `unchecked` stands for what is not known."""
        known = self._shares_now(now_s)
        if known:
            return sorted([*known, *[unchecked] * (WINDOW - len(known))])[-2]
        if not self.at_s:
            return unchecked
        # nobody loads at that price, or nobody asked: the longer that lasts, the cheaper a try
        silent = self._num_forgotten(now_s) - len(self.shares)
        return float(unchecked * 0.5 ** max(0, silent))

    def observe(self, load: Load, took_s: float, now_s: float) -> None:
        """A request that loaded over this link took so long, the time of others left out."""
        if not load.tells:
            return
        share = min(MOST, max(0.0, (took_s - load.work_s) / load.seconds))
        self.shares = [*self._shares_now(now_s), share][-WINDOW:]
        self.at_s = now_s

    def _shares_now(self, now_s: float) -> list[float]:
        """What is not forgotten, oldest first."""
        known = list(self.shares)
        for _ in range(min(len(known), self._num_forgotten(now_s))):
            known.remove(max(known))
        return known

    def _num_forgotten(self, now_s: float) -> int:
        age_s = now_s - self.at_s
        return len(self.shares) if age_s < -FORGET_S else int(age_s // FORGET_S)


class LinkArrival(NamedTuple):
    """How bytes come over one link."""

    link: str
    ready_s: float  # until its layers begin to come: what others wait for, what comes ahead of them
    layer_s: float  # for each of them
    waits: bool  # behind bytes of others


class LoadPipe(NamedTuple):
    """Some bytes, cut into layers, coming over some links at once."""

    num_layers: int
    arrivals: tuple[LinkArrival, ...]

    def done(self, start_s: float, compute_s: float) -> tuple[float, str | None]:
        """When all is computed, and the link that is slower than that, if one is."""
        done = start_s + compute_s
        waits_for: str | None = None
        num = self.num_layers
        c = compute_s / num
        for link, ready_s, layer_s, waits in self.arrivals:
            early = ready_s + layer_s + num * c  # held up at the first layer that loads
            late = ready_s + num * layer_s + c  # held up at the last
            if early > done:
                done, waits_for = early, link if waits else None
            if late > done:
                done, waits_for = late, link
        return done, waits_for
