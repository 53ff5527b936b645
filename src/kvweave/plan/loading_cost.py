"""What loading costs a request beyond what its compute hides: not assumed, learnt.

Reading, copying and computing at once should cost the longest of them. On real machines readers
and the thread that orders the pass take cores from each other, and a request pays for most of its
loading as if nothing overlapped. How much of it is its share:

    took = work + share · load        0: all hidden, 1: nothing hidden, more: slower than measured

A tier starts at `UNCHECKED`, dearer than no overlap at all, so that the first choice already holds.
Then the last requests say what it is. Of five the second highest counts: one outlier, such as a
first request that compiles kernels, changes nothing; two slow loads count at once; four fast ones
are believed.

A share that makes every plan compute gets no new observations. So it is forgotten: every `FORGET_S`
without one the highest is dropped, until loading is tried again; where it loses even at what stands
for the unknown, by a rare trial (`trial.py`). Of a clock that was set back nobody can say how long
ago anything was: its shares are forgotten at once.

Alone, a request computes while its layers come. Beside others it gets all its bytes first, and what
that took is known though its steps were shared: work + what it waited for bytes. Two numbers, so a
link has two `Paid`.
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
    share: float  # of them that the price holds, as far as no queue hides it
    work_s: float  # all else: choosing rows and computing
    least_s: float  # the whole price, were all of the load hidden that can be

    @property
    def tells(self) -> bool:
        """Whether what the request takes will say what was paid for the load."""
        return self.seconds > LEAST_LOAD * self.work_s


@dataclass(slots=True)
class Paid:
    """The shares that the last requests over one link paid. For one thread at a time."""

    shares: list[float] = field(default_factory=list)  # newest last
    at_s: float = 0.0  # Unix time of the newest

    def share(self, unchecked: float, now_s: float) -> float:
        """What the next request should expect. `unchecked` stands for what is not known."""
        if not self.shares:
            return unchecked
        known = self._known(now_s)
        return sorted([*known, *[unchecked] * (WINDOW - len(known))])[-2]

    def is_sure(self, now_s: float) -> bool:
        """Whether so many told that nothing unknown is left in `share`."""
        return len(self._known(now_s)) >= WINDOW - 1

    def observe(self, load: Load, took_s: float, now_s: float) -> None:
        """A request that loaded over this link took so long, the time of others left out."""
        if not load.tells:
            return
        share = min(MOST, max(0.0, (took_s - load.work_s) / load.seconds))
        self.shares = [*self._known(now_s), share][-WINDOW:]
        self.at_s = now_s

    def _known(self, now_s: float) -> list[float]:
        """What is not forgotten, oldest first."""
        known, age_s = list(self.shares), now_s - self.at_s
        num_forgotten = len(known) if age_s < -FORGET_S else int(age_s // FORGET_S)
        for _ in range(min(len(known), num_forgotten)):
            known.remove(max(known))
        return known
