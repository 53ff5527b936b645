"""What things cost on this machine: measured grids, links, and how they follow what happens.

A profile belongs to one model on one machine. It is measured (`grid_sampling.py`), saved as JSON,
and moved by every finished request and transfer: a price is a moving mean of what work of its kind
took. So what was measured on a busy machine is put right by answers.

Exact answers tell what prefill costs, fused ones what recomputing rows costs. Where only one kind
comes, the other's prices would stay wrong for ever: a fused way that is priced too dear is never
taken. So prices that no answer told of for `LONG_AGO` answers follow the others', by the relation
of the two. Recomputing is the same work as prefilling as many rows: the relation is 1 until answers
of both kinds say otherwise, and returns to 1 while no fused one does. Prefill follows downwards
only: where fused answers get slow, an exact one is to tell whether all of the machine did.
"""

import json
import math
import os
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvweave.errors import ConfigError
from kvweave.plan.loading_cost import PaidShares

GAIN = 0.25  # weight of the newest observation in every moving mean
NEAR = 0.15  # of what an answer moves, the part that moves only prices of prompts like its own
FARTHEST = 4.0  # what took longer than so many times its price says nothing more: a stall
LONG_AGO = 20  # answers
FOLLOW_GAIN = 0.2
FOLLOW_WITHIN = 1.5  # prices as near as that to what they follow keep their own shape
FORGET_UNPRICED = 0.02  # with every exact answer while no fused one comes: it is tried again
FORGET = 0.002  # of the relation, in powers, with every exact answer while no fused one comes
LEAST_RELATION = 0.5  # the same work: below that prefill is priced too dear
LEAST_TOKENS = 128  # of a prompt whose price says what another kind of prefill would cost
VERSION = 3  # of what is measured: a profile of another one is measured anew


@dataclass(slots=True)
class Grid:
    """Seconds over two measured axes; between points bilinear.

    Below the first point of an axis the first holds; beyond the last, `xs` is clamped and `ys`
    goes on along its last slope, which is never taken as less than half of what a row costs on the
    average. At y = 0 there is nothing to do.
    """

    xs: tuple[int, ...]  # cached tokens, or all tokens of the prompt
    ys: tuple[int, ...]  # new tokens, or rows to compute
    seconds: list[list[float]]  # [xs][ys]

    def __post_init__(self) -> None:
        for name, axis in (("xs", self.xs), ("ys", self.ys)):
            if not axis or list(axis) != sorted(set(axis)) or axis[0] < 0:
                raise ConfigError(f"Grid.{name} must rise from a number >= 0, got {axis}")
        if [len(row) for row in self.seconds] != [len(self.ys)] * len(self.xs):
            raise ConfigError(f"Grid.seconds must have {len(self.xs)} rows of {len(self.ys)}")

    def at(self, x: int, y: int) -> float:
        if y <= 0:
            return 0.0
        # `_bracket` for both axes, spelled out: a plan asks a dozen times
        xs, ys, seconds = self.xs, self.ys, self.seconds
        xh, yh = bisect_right(xs, x), bisect_right(ys, y)
        xl = xh - 1 if xh else 0
        low = seconds[xl]
        if xh and xh < len(xs):
            u = (x - xs[xl]) / (xs[xh] - xs[xl])
            high = seconds[xh]
        else:
            u, high = 0.0, low
        if yh == len(ys):
            if y > ys[-1]:
                return (1 - u) * _beyond(ys, low, y) + u * _beyond(ys, high, y)
            return (1 - u) * low[-1] + u * high[-1]
        if not yh:
            return (1 - u) * low[0] + u * high[0]
        yl = yh - 1
        v = (y - ys[yl]) / (ys[yh] - ys[yl])
        w = 1 - v
        if not u:
            return w * low[yl] + v * low[yh]
        return (1 - u) * (w * low[yl] + v * low[yh]) + u * (w * high[yl] + v * high[yh])

    def observe(self, x: int, y: int, seconds: float) -> None:
        """Move prices towards what a real run took, by GAIN of the way in powers: mostly all of
        them, because what slows one run down slows down others, and some only near it."""
        expected = self.at(x, y)
        if y <= 0 or expected <= 0 or seconds <= 0:
            return
        error = min(FARTHEST, max(1 / FARTHEST, seconds / expected))
        if y > self.ys[-1]:  # the slope of the last points would overshoot
            self.scale(error**GAIN)
            return
        self.scale(error ** (GAIN * (1 - NEAR)))
        xl, xh, u = _bracket(self.xs, x)
        yl, yh, v = _bracket(self.ys, y)
        shares: dict[tuple[int, int], float] = {}  # at the edge of the grid corners fall together
        for i, a in ((xl, 1 - u), (xh, u)):
            for j, b in ((yl, 1 - v), (yh, v)):
                shares[i, j] = shares.get((i, j), 0.0) + a * b
        squares = sum(share * share for share in shares.values())
        for (i, j), share in shares.items():
            self.seconds[i][j] *= error ** (GAIN * NEAR * share / squares)

    def scale(self, factor: float) -> None:
        """Everything takes so many times as long."""
        self.seconds = [[seconds * factor for seconds in row] for row in self.seconds]


@dataclass(slots=True)
class TierLink:
    """The path of bytes from one tier, as it has been lately."""

    bytes_per_s: float
    latency_s: float = 0.0  # per layer asked for
    seen_s: float = 0.0  # Unix time of the last transfer; a speed of long ago is worth little
    # what requests paid that loaded over it alone, and those that did while others ran
    paid: PaidShares = field(default_factory=PaidShares)
    paid_beside: PaidShares = field(default_factory=PaidShares)

    def paid_when(self, busy: bool) -> PaidShares:
        return self.paid_beside if busy else self.paid

    def observe(self, size_bytes: int, seconds: float) -> None:
        """A transfer finished. Its latency is left out of the bandwidth.

        Seconds per byte are averaged, not bytes per second: a tier that got slow is believed soon.
        """
        busy_s = seconds - self.latency_s
        if size_bytes > 0 and busy_s > 0:
            byte_s = (1 - GAIN) / self.bytes_per_s + GAIN * busy_s / size_bytes
            self.bytes_per_s = 1 / byte_s


@dataclass(slots=True)
class Heard:
    """What answers have told since the machine was measured."""

    exact: int = 0  # answers that moved the prices of prefill
    fused: int = 0  # those that moved the prices of recomputing rows
    exact_ago: int = LONG_AGO  # answers since the last of that kind
    fused_ago: int = LONG_AGO


@dataclass(slots=True)
class MachineProfile:
    """All measured prices of one model on one machine. Moved by `saw_exact`, `saw_fused`, `renew`
    and its links, by one thread at a time; a grid is replaced as a whole, so that any thread may
    ask `prefill` and `recompute` for a price meanwhile."""

    model: str  # fingerprint of the weights, as in the KV key
    device: str  # words for people: a profile of another machine should be noticed
    num_layers: int
    prefill: Grid  # xs: exact tokens in front, ys: tokens computed
    recompute: Grid  # xs: all tokens of the prompt, ys: rows computed among them
    links: dict[str, TierLink] = field(default_factory=dict)  # by `link_name`
    stitch_s: float = 0.0  # decoding and turning one stored token, all layers; nothing hides it
    version: int = VERSION
    relation: float = 1.0  # what a row recomputed costs, over one prefilled behind as many tokens
    unpriced_s: float = 0.0  # of a fused answer beside loading, rows and probe: the host's, mostly
    measured_s: float = 0.0  # Unix time; 0: not known
    is_provisional: bool = False  # other programs used the machine meanwhile: to be measured again
    heard: Heard = field(default_factory=Heard)

    def prefill_s(self, cached: int, new: int) -> float:
        """Seconds for `new` tokens behind `cached` exact ones, also after `renew`. Any thread."""
        return self.prefill.at(cached, new)

    def saw_exact(self, cached: int, new: int, seconds: float) -> None:
        """A request that computed `new` tokens behind `cached` exact ones took so long."""
        heard, total = self.heard, cached + new
        self.prefill.observe(cached, new, seconds)
        heard.exact, heard.exact_ago, heard.fused_ago = heard.exact + 1, 0, heard.fused_ago + 1
        if heard.fused_ago >= LONG_AGO:
            self.unpriced_s *= 1 - FORGET_UNPRICED
        if heard.fused_ago >= LONG_AGO and total >= LEAST_TOKENS:
            self.relation **= 1 - FORGET
            self.recompute.scale(_towards(1 / self._apart(total, total // 5)))

    def saw_fused(self, total: int, rows: int, seconds: float) -> None:
        """A request that computed `rows` among `total` tokens took so long for that."""
        heard = self.heard
        self.recompute.observe(total, rows, seconds)
        heard.fused, heard.fused_ago, heard.exact_ago = heard.fused + 1, 0, heard.exact_ago + 1
        if total < LEAST_TOKENS or rows <= 0 or rows > total:
            return
        if heard.exact_ago >= LONG_AGO:  # dearer it gets by an exact answer alone, which comes then
            self.prefill.scale(min(1.0, _towards(self._apart(total, rows))))
        else:
            prefilled_s = self.prefill.at(total - rows, rows)
            if prefilled_s > 0:
                error = seconds / prefilled_s / self.relation
                moved = self.relation * min(FARTHEST, max(1 / FARTHEST, error)) ** GAIN
                self.relation = max(LEAST_RELATION, moved)

    def saw_unpriced(self, seconds: float, work_s: float) -> None:
        """A fused answer, alone, took so many seconds that no price holds, and `work_s` by its
        prices: on a fast device what the host does counts, whatever the length of the prompt."""
        most_s = FARTHEST * work_s  # more is a stall
        self.unpriced_s += GAIN * (min(most_s, max(0.0, seconds)) - self.unpriced_s)

    def renew(self, measured: "MachineProfile") -> None:
        """Take the prices of computing from a new measurement. Links stay: they are measured when
        something lies there."""
        self.prefill, self.recompute = measured.prefill, measured.recompute
        self.stitch_s, self.relation = measured.stitch_s, measured.relation
        self.unpriced_s = measured.unpriced_s
        self.measured_s, self.is_provisional = measured.measured_s, measured.is_provisional
        self.heard = Heard()
        for name, link in measured.links.items():
            self.links.setdefault(name, link).bytes_per_s = link.bytes_per_s

    def _apart(self, total: int, rows: int) -> float:
        """How many times dearer recomputing is than what prefill and the relation say."""
        prefilled_s = self.prefill.at(total - rows, rows)
        recomputed_s = self.recompute.at(total, rows)
        if prefilled_s <= 0 or recomputed_s <= 0:
            return 1.0
        return recomputed_s / (self.relation * prefilled_s)

    def link(self, name: str) -> TierLink | None:
        """The link called `name`, or its tier's for any codec; None when neither was measured."""
        return self.links.get(name) or self.links.get(tier_of(name))

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # of this call alone: several threads of a process may save at once
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
        try:
            temporary.write_text(json.dumps(asdict(self), indent=1) + "\n")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def link_name(tier: str, codec: str = "") -> str:
    """Bytes of another codec come at another pace: objects differ in size and in what they need."""
    return f"{tier}/{codec}" if codec else tier


def tier_of(link: str) -> str:
    return link.rpartition("/")[0] or link


def load_profile(path: Path) -> MachineProfile:
    """A saved profile. ConfigError names the file when it is not one."""
    try:
        return profile_from(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is not a machine profile: {error}; measure it anew") from error


def profile_from(saved: Mapping[str, Any]) -> MachineProfile:
    """Return a profile from its JSON object. Raises ValueError, KeyError and TypeError."""
    version = int(saved.get("version", 1))
    profile = MachineProfile(
        saved["model"],
        saved["device"],
        int(saved["num_layers"]),
        _grid_from(saved["prefill"]),
        _grid_from(saved["recompute"]),
        {name: _link_from(link) for name, link in saved["links"].items()},
        stitch_s=float(saved.get("stitch_s", 0.0)),
        version=version,
        relation=float(saved.get("relation", 1.0)),
        unpriced_s=float(saved.get("unpriced_s", 0.0)),
        measured_s=float(saved.get("measured_s", 0.0)),
        is_provisional=bool(saved.get("is_provisional", False)),
        heard=Heard(**saved.get("heard", {})) if version == VERSION else Heard(),
    )
    grids = (profile.prefill, profile.recompute)
    times = [seconds for grid in grids for row in grid.seconds for seconds in row]
    _check_numbers((*times, profile.stitch_s, profile.unpriced_s, profile.measured_s), "a time")
    speeds = [link.bytes_per_s for link in profile.links.values()]
    if not all(math.isfinite(number) and number > 0 for number in (*speeds, profile.relation)):
        raise ValueError("a speed, or the relation of recomputing to prefill, is not above 0")
    return profile


def _grid_from(saved: Mapping[str, Any]) -> Grid:
    seconds = [[float(each) for each in row] for row in saved["seconds"]]
    return Grid(tuple(saved["xs"]), tuple(saved["ys"]), seconds)


def _check_numbers(numbers: Iterable[float], name: str) -> None:
    if not all(math.isfinite(number) and number >= 0 for number in numbers):
        raise ValueError(f"{name} is negative or no number")


def _link_from(saved: Mapping[str, Any]) -> TierLink:
    others = ("pending_bytes", "paid", "paid_beside")  # the first is of version 1
    known = {k: v for k, v in saved.items() if k not in others}
    return TierLink(
        **known, paid=_paid_from(saved, "paid"), paid_beside=_paid_from(saved, "paid_beside")
    )


def _paid_from(saved: Mapping[str, Any], name: str) -> PaidShares:
    paid = saved.get(name, {})  # of a profile that was saved before there was any
    shares, at_s = [float(s) for s in paid.get("shares", ())], float(paid.get("at_s", 0.0))
    _check_numbers((*shares, at_s), "a share of loading, or its time,")
    return PaidShares(shares, at_s)


def _towards(apart: float) -> float:
    """The factor by which prices follow others that say `apart` times as much."""
    if 1 / FOLLOW_WITHIN <= apart <= FOLLOW_WITHIN:
        return 1.0
    return float(apart**FOLLOW_GAIN)


def _bracket(axis: tuple[int, ...], value: int) -> tuple[int, int, float]:
    """Places on both sides of a value and how far it lies between them; clamped to the axis."""
    high = bisect_right(axis, value)
    if not high:
        return 0, 0, 0.0
    low = high - 1
    if high == len(axis):
        return low, low, 0.0
    start = axis[low]
    return low, high, (value - start) / (axis[high] - start)


def _beyond(ys: tuple[int, ...], row: list[float], y: int) -> float:
    if len(ys) == 1:
        return row[0] * y / max(1, ys[0])
    # noise can make the last step flat or falling: then a thousand rows more would cost nothing,
    # and nothing would be worth loading
    slope = max(0.5 * row[-1] / ys[-1], (row[-1] - row[-2]) / (ys[-1] - ys[-2]))
    return row[-1] + slope * (y - ys[-1])
