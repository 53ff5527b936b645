"""Which way each product with rounded weights takes on this machine: measured once, kept on disk.

    <home>/profiles/products-<CPU, torch, threads, kernels>.json

A file of another CPU, torch version, number of threads or of other compiled kernels has another
name, and one whose contents do not say the same as its name is measured anew. A folder that cannot
be written costs the measurement at every start. Times that only a busy machine explains are taken
once more, and not kept if that does not help.
"""

import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvweave import paths
from kvweave.kernels.dispatch import compiled_words
from kvweave.kernels.linear import Linear, Projection
from kvweave.kernels.native.loading import native_kernels
from kvweave.kernels.product_probe import (
    BOUNDS,
    ROWS,
    Shape,
    Times,
    choose_ways,
    is_doubtful,
    measure_ways,
)
from kvweave.kernels.products import FLOAT32, WAYS, ByRows
from kvweave.kernels.rounded import round_weight

log = logging.getLogger(__name__)
stages = logging.getLogger("kvweave.stages")  # what a server does before it is ready

FORMAT = 2


def machine_words() -> str:
    """What the times depend on."""
    cpu = platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        named = [line.partition(":")[2].strip() for line in lines if line.startswith(_NAMES)]
        cpu = " ".join(dict.fromkeys(named)) or cpu
    capability = torch.backends.cpu.get_cpu_capability()
    threads = torch.get_num_threads()
    native_kernels()  # now, if nobody asked yet: they are among the ways
    return (
        f"{platform.machine()} {cpu} {capability}, torch {torch.__version__}, {threads} threads, "
        f"{compiled_words()}"
    )


def ways_path() -> Path:
    """Where the times of this machine lie."""
    digest = hashlib.blake2b(machine_words().encode(), digest_size=8).hexdigest()
    return paths.home() / "profiles" / f"products-{digest}.json"


_NAMES = ("model name", "CPU implementer", "CPU part")


class ProductWays:
    """The times of every shape that was asked for. Not for many threads."""

    def __init__(
        self,
        path: Path | None = None,
        *,
        machine: str | None = None,
        measure: Callable[[Shape], Times] = measure_ways,
    ) -> None:
        """`path`: None is the file of this machine. `machine` and `measure` are for tests."""
        self._machine = machine or machine_words()
        self._path = path or ways_path()
        self._measure = measure
        self._times = self._load()

    def times(self, shape: Shape) -> Times:
        """Seconds by way and rows; measures them if nobody has."""
        shape = shape.measured
        if shape not in self._times:
            stages.info("measuring products of %d × %d on this machine, once", *shape)
            self._times[shape] = self._measure(shape)
            if is_doubtful(shape, self._times[shape]):
                self._times[shape] = self._measure(shape)
            self._save()
        return self._times[shape]

    def product(
        self,
        linear: Linear,
        parts: Tensor | None,
        powers: Tensor | None = None,
        *,
        least_rows: int = 1,
    ) -> tuple[Projection, tuple[str, ...]]:
        """`linear` by the fastest ways, dims split into `parts` and evened out by `powers`; and
        which these are, by ROWS. `linear` itself where float32 is taken; that float32 is faster
        with fewer than `least_rows` does not count."""
        shape = Shape(linear.weight.shape[1], linear.weight.shape[0])
        times = self.times(shape)
        doubtful = is_doubtful(shape.measured, times)
        names = choose_ways(times, doubtful=doubtful, least_rows=least_rows)
        if set(names) == {FLOAT32}:
            return linear, names
        weight = round_weight(linear.weight, linear.bias, parts, powers)
        made = {name: WAYS[name](weight) for name in set(names)}
        ends = (*BOUNDS, ROWS[-1])
        return ByRows([(end, made[name]) for end, name in zip(ends, names, strict=True)]), names

    def _load(self) -> dict[Shape, Times]:
        try:
            kept = json.loads(self._path.read_text())
            if (kept["format"], kept["machine"]) != (FORMAT, self._machine):
                return {}
            return {_shape(name): _times(each) for name, each in kept["shapes"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}  # none yet, or broken: measured (again)

    def _save(self) -> None:
        kept_times = ((s, t) for s, t in self._times.items() if not is_doubtful(s, t))
        shapes = {f"{s.in_dim}x{s.out_dim}": times for s, times in kept_times}
        kept = {"format": FORMAT, "machine": self._machine, "shapes": shapes}
        fresh = self._path.with_name(f"{self._path.name}.{os.getpid()}.{os.urandom(4).hex()}.new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fresh.write_text(json.dumps(kept, indent=1) + "\n")
            fresh.replace(self._path)
        except OSError as error:
            log.warning("cannot keep the times of products %s: %s", self._path, error.strerror)


def _shape(name: str) -> Shape:
    in_dim, out_dim = name.split("x")
    return Shape(int(in_dim), int(out_dim))


def _times(kept: Mapping[str, Mapping[str, Any]]) -> Times:
    """Times from JSON, whose keys are strings. Raises where float32's are missing."""
    times = {way: {int(r): float(s) for r, s in each.items()} for way, each in kept.items()}
    if not set(ROWS) <= set(times[FLOAT32]):
        raise ValueError("float32 was not measured")
    return {way: each for way, each in times.items() if way in WAYS or way == FLOAT32}
