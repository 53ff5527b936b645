"""Layers that arrive while those before them compute: when is the last one done?

    done = start;  for each layer: ready += latency + bytes/bandwidth;  done = max(done, ready) + c

With equal layers that is the largest of three straight lines per link, so a price costs a few
multiplications instead of a loop over layers. What of it depends on the bytes alone is worked out
once, and asked for with every way to compute.
"""

from typing import NamedTuple


class LinkArrival(NamedTuple):
    """How bytes come over one link."""

    link: str
    ready_s: float  # until its layers begin to come: what others wait for, what comes ahead of them
    layer_s: float  # for each of them
    waits: bool  # behind bytes of others


class Pipe(NamedTuple):
    """Some bytes, cut into layers, on their way over some links at once."""

    num_layers: int
    num_loaded: int  # layers that need bytes: all, or all but the first
    arrivals: tuple[LinkArrival, ...]

    def done(self, start_s: float, compute_s: float) -> tuple[float, str | None]:
        """When all is computed, and the link that is slower than that, if one is."""
        done = start_s + compute_s
        waits_for: str | None = None
        c, num = compute_s / self.num_layers, self.num_loaded
        for link, ready_s, layer_s, waits in self.arrivals:
            early = ready_s + layer_s + num * c  # held up at the first layer that loads
            late = ready_s + num * layer_s + c  # held up at the last
            if early > done:
                done, waits_for = early, link if waits else None
            if late > done:
                done, waits_for = late, link
        return done, waits_for
