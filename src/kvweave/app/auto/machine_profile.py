"""What this machine takes to compute and to load, measured with the real decoder and kept.

    <home>/profiles/machine-<decoder>-<device>.json

Measured before a server with knowledge bases is ready, with the first question that asks for
`reuse="auto"`, by `kvweave measure`, in seconds, or in idle time (`measurements.py`). Every
answer moves it (`lessons.py`), so that what was measured on a busy machine does not stay wrong.
"""

import logging
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from kvweave import paths
from kvweave.app.auto.other_work import BUSY_CORES, OtherWork
from kvweave.app.library.library_kv import CODEC
from kvweave.errors import ConfigError
from kvweave.fuse.transfer.placement import packing_of
from kvweave.kernels.rope import rotate
from kvweave.kernels.types import StoredRows
from kvweave.kernels.unpack import unpack
from kvweave.kv.format.codec import LayerKV, dtype_name, open_codec
from kvweave.kv.format.header import LayerShape
from kvweave.kv.tree.node import HOST
from kvweave.model.decoder import Decoder
from kvweave.model.rows import Rows
from kvweave.plan.grid_sampling import SAMPLES, CrossSampling, grid_of, measure_in_turns
from kvweave.plan.profile import VERSION, MachineProfile, TierLink, load_profile

log = logging.getLogger(__name__)

PREFILL_BUDGET_S = 5.0  # large points are left out on a machine too slow for them
RECOMPUTE_BUDGET_S = 3.0
CACHED = (0, 512, 2048)  # exact tokens in front of what is computed
NEW = (16, 64, 256, 1024)
PROMPTS = (512, 2048)  # all tokens of a prompt of which some rows are computed
ROWS = (32, 128, 384)
# a GPU is measured where it is used: small passes there cost what ordering them costs
GPU_AXES = ((0, 8192), (32, 512, 4096, 16384), (2048, 8192, 32768), (64, 1024, 6144))
# in idle time, run by run, a CPU is measured where a run is short: longer prompts are its slices
IDLE_AXES = (CACHED, (16, 64, 128), PROMPTS, (32, 64, 128))
COPIED_BYTES = 32 << 20

Say = Callable[[str], None]


def say_on_stderr(line: str) -> None:
    print(f"kvweave: {line}", file=sys.stderr, flush=True)


def profile_path(decoder: Decoder, codec: str = CODEC) -> Path:
    """Where the profile of this decoder on this machine lies, for chunk KV written with `codec`:
    the time to decode it is among the prices."""
    name = re.sub(r"[^a-z0-9]+", "-", device_words(decoder).lower()).strip("-")
    of_codec = "" if codec == CODEC else f"-{codec}"
    return paths.home() / "profiles" / f"machine-{decoder.revision[:16]}-{name}{of_codec}.json"


def device_words(decoder: Decoder) -> str:
    """What the decoder runs on: prices of one are none of another's."""
    if decoder.device.type == "cuda":
        return torch.cuda.get_device_name(decoder.device)
    return f"cpu, {torch.get_num_threads()} threads"


def find_machine(decoder: Decoder, codec: str = CODEC) -> MachineProfile | None:
    """The saved profile of this decoder on this machine. None: there is none that can be used."""
    path = profile_path(decoder, codec)
    if not path.is_file():
        return None
    try:
        found = load_profile(path)
    except ConfigError as error:
        log.warning("%s", error)
        return None
    if found.version != VERSION:
        log.info("%s is of an earlier version", path)
        return None
    if (found.model, found.num_layers) != (decoder.revision, decoder.spec.num_layers):
        log.warning("%s is of another model", path)
        return None
    return found


def new_machine(decoder: Decoder, codec: str, say: Say = say_on_stderr) -> MachineProfile:
    """A new profile, saved. Runs the decoder: call it on the thread that owns it."""
    path = profile_path(decoder, codec)
    say("measuring this machine for reuse 'auto', once …")
    started_s = time.perf_counter()
    measurement = Measurement(decoder, codec)
    measurement.finish()
    profile = measurement.profile()
    save(profile, path)
    busy = " beside other programs; again when they rest" if profile.is_provisional else ""
    say(f"measured in {time.perf_counter() - started_s:.1f} s{busy}: {path}")
    return profile


def save(profile: MachineProfile, path: Path) -> None:
    """Keep it for the next start, unless a newer measurement lies there. A folder that cannot be
    written costs a new measurement then."""
    try:
        if path.is_file() and _is_newer(path, profile):
            return
        profile.save(path)
    except OSError as error:
        log.warning("cannot keep the machine profile %s: %s", path, error.strerror)


def _is_newer(path: Path, profile: MachineProfile) -> bool:
    try:
        kept = load_profile(path)
    except ConfigError:
        return False
    same = (kept.model, kept.version) == (profile.model, profile.version)
    return same and kept.measured_s > profile.measured_s


class Measurement:
    """Prefill, recomputation, decoding of chunk KV and host memory, run by run. Tiers are measured
    when they are first met, with a chunk that they hold: see lessons.py.

    Runs the decoder: for the thread that owns it.
    """

    def __init__(self, decoder: Decoder, codec: str, longest_s: float = float("inf")) -> None:
        """`longest_s`: of one run; where it is given, long prompts are priced as their slices."""
        self._decoder = decoder
        self._codec = codec
        room = decoder.spec.max_context // 2
        self._on_gpu = decoder.device.type == "cuda"
        axes = (CACHED, NEW, PROMPTS, ROWS) if longest_s == float("inf") else IDLE_AXES
        cached, new, prompts, rows = (
            tuple(sorted({min(value, room) for value in axis}))
            for axis in (GPU_AXES if self._on_gpu else axes)
        )
        self._cached, self._prompts = cached, prompts
        self._prefill = CrossSampling(
            Prefill(decoder), cached, new, cached[0], PREFILL_BUDGET_S, longest_s
        )
        self._recompute = CrossSampling(
            Recompute(decoder), prompts, rows, prompts[-1], RECOMPUTE_BUDGET_S, longest_s
        )
        self._is_warm = False
        self._next = 0
        self._others = OtherWork()
        self._beside: tuple[float, float] | None = None  # seconds to lay a token, host bytes/s

    def finish(self) -> None:
        """All runs that the budget has time for."""
        self._warm()
        measure_in_turns((self._prefill, self._recompute))
        self._beside = self._lay_and_copy()

    def step(self) -> bool:
        """The next run alone. False: there is none left, and `profile` can be asked."""
        if not self._is_warm:
            self._warm()
            return True
        crosses = (self._prefill, self._recompute)
        for _ in crosses:
            cross, self._next = crosses[self._next], 1 - self._next
            if cross.step():
                return True
        if self._beside is None:
            self._beside = self._lay_and_copy()
            return True
        return False

    def profile(self) -> MachineProfile:
        """What was measured."""
        assert self._beside is not None, "it was finished before"
        stitch_s, host_bytes_per_s = self._beside
        decoder = self._decoder
        return MachineProfile(
            decoder.revision,
            device_words(decoder),
            decoder.spec.num_layers,
            grid_of(self._prefill.samples(), self._cached, in_slices=True),
            grid_of(self._recompute.samples(), self._prompts, in_slices=False),
            {HOST.value: TierLink(host_bytes_per_s)},
            stitch_s,
            measured_s=time.time(),
            is_provisional=self._others.cores() > BUSY_CORES,
        )

    def _warm(self) -> None:
        """The first run of all pays for what later ones find warm."""
        Prefill(self._decoder)(0, NEW[0])
        self._is_warm = True

    def _lay_and_copy(self) -> tuple[float, float]:
        lay = _unpack_s if self._on_gpu else _stitch_s
        return lay(self._decoder, self._codec), copy_bytes_per_s(self._decoder)


class Prefill:
    """Runs `new` tokens behind `cached` ones. What those hold does not change the time."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def __call__(self, cached: int, new: int) -> float:
        return _run(self._decoder, cached, cached + new, range(cached, cached + new))


class Recompute:
    """Runs `rows` of `total` tokens, spread evenly, as a fused pass computes them."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def __call__(self, total: int, rows: int) -> float:
        rows = min(rows, total)
        return _run(self._decoder, total, total, [i * total // rows for i in range(rows)])


def _run(decoder: Decoder, present: int, total: int, positions: Sequence[int]) -> float:
    """Seconds of one pass over `positions`; `present` tokens are there before the clock starts."""
    kv = decoder.new_kv(total)
    kv.reserve(present)
    for layer in range(decoder.spec.num_layers if present else 0):
        kv.keys(layer).zero_()
        kv.values(layer).zero_()
    wait_for(decoder)
    started_s = time.perf_counter()
    decoder.forward([Rows([1] * len(positions), positions, kv, [len(positions) - 1])])
    wait_for(decoder)
    return time.perf_counter() - started_s


def wait_for(decoder: Decoder) -> None:
    """Until the device has done what it was told: a clock read before that lies."""
    if decoder.device.type == "cuda":
        torch.cuda.synchronize(decoder.device)


def copy_bytes_per_s(decoder: Decoder) -> float:
    """Copies inside host memory, or from page-locked memory to the GPU: no load from the host tier
    is faster."""
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8)
    if decoder.device.type == "cuda":
        source = source.pin_memory()
    target = torch.empty_like(source, device=decoder.device)
    target.copy_(source)

    def copy() -> None:
        target.copy_(source)
        wait_for(decoder)

    return COPIED_BYTES / _shortest_s(copy)


@torch.inference_mode()
def _stitch_s(decoder: Decoder, codec: str, num_tokens: int = 256) -> float:
    """Seconds per stored token from bytes in host memory to its place in a prompt."""
    spec, how = decoder.spec, open_codec(codec)
    shape = LayerShape(num_tokens, spec.num_kv_heads, spec.head_dim, dtype_name(decoder.dtype))
    kv = LayerKV(*torch.randn(2, *shape[:3]).to(decoder.dtype))
    data = torch.empty(how.num_bytes(shape), dtype=torch.uint8)
    how.encode(kv, data)
    angles = decoder.angles(torch.arange(num_tokens, device=decoder.device))

    def one_layer() -> None:
        k, v = how.decode(data, shape)
        rotate(k.to(decoder.device), angles)
        v.to(decoder.device).clone()
        wait_for(decoder)

    one_layer()
    return _shortest_s(one_layer) * spec.num_layers / num_tokens


@torch.inference_mode()
def _unpack_s(decoder: Decoder, codec: str, num_tokens: int = 4096) -> float:
    """Seconds per stored token on a GPU, where one kernel decodes and turns bytes once they are
    there."""
    spec, how, device = decoder.spec, open_codec(codec), decoder.device
    shape = LayerShape(num_tokens, spec.num_kv_heads, spec.head_dim, dtype_name(decoder.dtype))
    kv = LayerKV(*torch.randn(2, *shape[:3], device=device).to(decoder.dtype))
    data = torch.empty(how.num_bytes(shape), dtype=torch.uint8, device=device)
    how.encode(kv, data)
    at = torch.arange(num_tokens, device=device)
    rows = StoredRows(torch.zeros_like(at), at, torch.full_like(at, num_tokens), at)
    packing, angles = packing_of(how, decoder.dtype), decoder.angles(at)

    def one_layer() -> None:
        unpack(data, packing, rows, angles, kv.k, kv.v)
        wait_for(decoder)

    one_layer()
    return _shortest_s(one_layer) * spec.num_layers / num_tokens


def _shortest_s(run: Callable[[], None]) -> float:
    """Time the shortest of several runs: other work makes one longer, never shorter."""
    times = []
    for _ in range(SAMPLES):
        started_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - started_s)
    return min(times)
