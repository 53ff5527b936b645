"""What things cost on this machine: measured grids, links, and how they follow what happens.

A profile belongs to one model on one machine. It is measured once (`grid_sampling.py`), saved as
JSON, and moved by every finished request and transfer, so that a machine under load is priced as it
is.
"""

import json
import math
import os
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvweave.errors import ConfigError
from kvweave.plan.loading_cost import PaidShares

GAIN = 0.1  # weight of the newest observation in every moving estimate
VERSION = 2  # of what is measured: a profile of another one is measured anew


@dataclass(slots=True)
class Grid:
    """Seconds over two measured axes; between points bilinear.

    Below the first point of an axis the first holds; beyond the last, `xs` is clamped and `ys`
    goes on along its last slope, which is never taken as falling. At y = 0 there is nothing to do.
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
        ys = self.ys
        xl, xh, u = _bracket(self.xs, x)
        low, high = self.seconds[xl], self.seconds[xh]
        if y > ys[-1]:
            return (1 - u) * _beyond(ys, low, y) + u * _beyond(ys, high, y)
        yl, yh, v = _bracket(ys, y)
        w = 1 - v
        if not u:
            return w * low[yl] + v * low[yh]
        return (1 - u) * (w * low[yl] + v * low[yh]) + u * (w * high[yl] + v * high[yh])

    def observe(self, x: int, y: int, seconds: float, gain: float = GAIN) -> None:
        """A real run took so long: move the points around it by their share of the error."""
        expected = self.at(x, y)
        if y <= 0 or expected <= 0 or seconds <= 0:
            return
        error = seconds / expected - 1
        xl, xh, u = _bracket(self.xs, x)
        yl, yh, v = _bracket(self.ys, y)
        shares: dict[tuple[int, int], float] = {}  # at the edge of the grid corners fall together
        for i, a in ((xl, 1 - u), (xh, u)):
            for j, b in ((yl, 1 - v), (yh, v)):
                shares[i, j] = shares.get((i, j), 0.0) + a * b
        for (i, j), share in shares.items():
            self.seconds[i][j] *= max(0.1, 1 + gain * share * error)  # one outlier cannot zero it


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

    def observe(self, size_bytes: int, seconds: float, gain: float = GAIN) -> None:
        """A transfer finished. Its latency is left out of the bandwidth.

        Seconds per byte are averaged, not bytes per second: a tier that got slow is believed soon.
        """
        busy_s = seconds - self.latency_s
        if size_bytes > 0 and busy_s > 0:
            byte_s = (1 - gain) / self.bytes_per_s + gain * busy_s / size_bytes
            self.bytes_per_s = 1 / byte_s

    def seconds(self, size_bytes: int) -> float:
        return size_bytes / self.bytes_per_s


@dataclass(slots=True)
class MachineProfile:
    """All measured prices of one model on one machine. Moved by `observe` of its grids and
    links, by one thread at a time."""

    model: str  # fingerprint of the weights, as in the KV key
    device: str  # words for people: a profile of another machine should be noticed
    num_layers: int
    prefill: Grid  # xs: exact tokens in front, ys: tokens computed
    recompute: Grid  # xs: all tokens of the prompt, ys: rows computed among them
    links: dict[str, TierLink] = field(default_factory=dict)  # by `link_name`
    stitch_s: float = 0.0  # decoding and turning one stored token, all layers; nothing hides it
    version: int = VERSION

    def link(self, name: str) -> TierLink | None:
        """The link called `name`, or its tier's for any codec; None when neither was measured."""
        return self.links.get(name) or self.links.get(tier_of(name))

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(asdict(self), indent=1) + "\n")
        temporary.replace(path)


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
    grids = {
        name: Grid(
            tuple(saved[name]["xs"]),
            tuple(saved[name]["ys"]),
            [[float(s) for s in row] for row in saved[name]["seconds"]],
        )
        for name in ("prefill", "recompute")
    }
    links = {name: _link_from(link) for name, link in saved["links"].items()}
    stitch_s = float(saved.get("stitch_s", 0.0))
    times = [s for grid in grids.values() for row in grid.seconds for s in row]
    speeds = [link.bytes_per_s for link in links.values()]
    if not all(math.isfinite(s) and s >= 0 for s in (*times, stitch_s)):
        raise ValueError("a time is negative or no number")
    if not all(math.isfinite(speed) and speed > 0 for speed in speeds):
        raise ValueError("a speed is not above 0")
    return MachineProfile(
        saved["model"],
        saved["device"],
        int(saved["num_layers"]),
        **grids,
        links=links,
        stitch_s=stitch_s,
        version=int(saved.get("version", 1)),
    )


def _link_from(saved: Mapping[str, Any]) -> TierLink:
    others = ("pending_bytes", "paid", "paid_beside")  # the first is of version 1
    known = {k: v for k, v in saved.items() if k not in others}
    return TierLink(
        **known, paid=_paid_from(saved, "paid"), paid_beside=_paid_from(saved, "paid_beside")
    )


def _paid_from(saved: Mapping[str, Any], name: str) -> PaidShares:
    paid = saved.get(name, {})  # of a profile that was saved before there was any
    shares, at_s = [float(s) for s in paid.get("shares", ())], float(paid.get("at_s", 0.0))
    if not all(math.isfinite(number) and number >= 0 for number in (*shares, at_s)):
        raise ValueError("a share of loading, or its time, is negative or no number")
    return PaidShares(shares, at_s)


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
    slope = max(0.0, (row[-1] - row[-2]) / (ys[-1] - ys[-2]))
    return row[-1] + slope * (y - ys[-1])
