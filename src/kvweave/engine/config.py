"""The engine's settings. Plain values: importing this imports no torch."""

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Literal, get_args

from kvweave.errors import ConfigError

# What is left open: on a CPU, and on everything else. `for_device` says why.
ON_CPU = {
    "page_tokens": 32,
    "step_rows": 256,
    "alone_rows": 2048,
    "guess_rows": 128,
    "background_rows": 32,
    "copy_tokens": 15,
}
ON_DEVICE = {
    "page_tokens": 64,
    "step_rows": 2048,
    "alone_rows": 8192,
    "guess_rows": 512,
    "background_rows": 256,
    "copy_tokens": 0,
}
GUESS_ALONE_ROWS = 8192  # on everything else
SharedCodec = Literal["raw", "int8"]
AT_LEAST_ONE = (
    "page_tokens", "step_rows", "alone_rows", "guess_rows", "background_rows",
    "guess_alone_rows", "max_running", "prompts_per_step",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How much the engine takes on at once."""

    page_tokens: int | None = None  # of one page; None, here and below: what suits the device
    pool_tokens: int | None = None  # room for KV of all sequences; None: a quarter of the memory
    pool_share: float = 0.25  # of the free memory, for a pool whose size is left open
    max_running: int = 32  # sequences that are computed at once
    step_rows: int | None = (
        None  # of a step while a sequence decodes: bounds the gap between tokens
    )
    alone_rows: int | None = None  # of a step while none does
    guess_rows: int | None = None  # of a speculation in one step with others
    guess_alone_rows: int | None = None  # in one that has nothing but speculations; None: as many,
    # on a GPU all. If these are more, such a step is given up between two layers when others come
    # of a step in idle time: an arrival waits for a layer of it, the fourth time for the whole
    background_rows: int | None = None
    tree_share: float = 0.5  # of the pool, for exact KV that no request is using
    # what of it stays, and of shared chunks: lru, lfu, gdsf or pgdsf; auto: what the tree finds
    tree_policy: str = "auto"  # to keep more of late of the last two, and pgdsf for shared chunks
    host_tokens: int | None = None  # exact KV kept in host memory when it leaves the pool; None:
    # four times the pool beside a GPU, nothing on a CPU, where the pool is host memory already
    share_chunks: bool | None = None  # fused requests read chunk KV from pages that all of them
    # share, instead of a copy each; None: on a GPU with Triton, which has kernels for it
    shared_codec: SharedCodec = "raw"  # how shared chunks lie there: as own rows do, or in 8 bits,
    # of which a page holds twice as many tokens (four times in single precision)
    recorded_rows: int = 128  # on a GPU, steps of up to so many rows in which sequences decode, or
    # ask over chunks that lie ready, and nothing else happens are played from CUDA graphs; 0: none
    # while a prompt over shared chunks is computed, the next one and a step of all others are
    # ordered as well: the device has one while the host is at the other. None: on a GPU
    overlap_steps: bool | None = None
    prompts_per_step: int = 2  # such prompts between two steps of all others, while prompts wait:
    # more of them begin to answer per second, and the gap between two tokens grows by one
    # tokens of an answer that are guessed from what its request has read, and computed in one step
    # with the one that is due (drafts.py); 0: none; None: 15 on a CPU, none elsewhere
    copy_tokens: int | None = None
    # on a GPU sums have one order, whatever is computed beside them (kernels/fixed_order.py): exact
    # answers have the bits of full prefill's, as they have on a CPU. For the whole process
    exact: bool = False
    idle_s: float = 5.0  # the thread ends after so long without work, and starts again with it

    def __post_init__(self) -> None:
        for name in AT_LEAST_ONE:
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"EngineConfig.{name} must be at least 1")
        if self.shared_codec not in get_args(SharedCodec):
            known = ", ".join(get_args(SharedCodec))
            raise ConfigError(f"EngineConfig.shared_codec is one of {known}")
        if self.shared_codec != "raw" and self.share_chunks is False:
            raise ConfigError(
                f"shared_codec {self.shared_codec} is for chunks that are shared; set share_chunks"
            )
        if not 0.0 < self.pool_share <= 1.0:
            raise ConfigError("EngineConfig.pool_share must be above 0 and at most 1")
        for name in ("recorded_rows", "copy_tokens"):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(f"EngineConfig.{name} must be at least 0")
        if not 0.0 <= self.tree_share <= 1.0:
            raise ConfigError("EngineConfig.tree_share must lie in [0, 1]")
        if self.pool_tokens is not None and self.pool_tokens < (self.page_tokens or 1):
            raise ConfigError("EngineConfig.pool_tokens must hold at least one page")


def for_device(cfg: EngineConfig, device_type: str) -> EngineConfig:
    """What was left open, as suits a device of this type ("cpu", "cuda", …).

    Pages: a GPU reads those of 64 tokens within 5 % of dense KV and those of 32 up to 8 % slower
    (docs/gpu.md); a CPU has small ones, of which less is copied. Steps: a slice of 256 rows leaves
    most of a GPU idle. Speculations: one that turns out wrong ends between two steps, so its steps
    should be as short as the device computes without waste (128 rows on a CPU, where 64 take half
    as long again). A GPU is told of 1,000 rows as fast as of 512: alone there, a whole prompt is
    one step, which can end between two layers. Background steps: shorter still, because what
    gives way is lost; that they cost more per row does not matter in idle time. Copied tokens: up
    to 16 rows a CPU computes in one call, at nearly the price of one; a GPU was not measured.
    Raises ConfigError if the pool does not hold a page of the size chosen here.
    """
    values = ON_CPU if device_type == "cpu" else ON_DEVICE
    left: dict[str, Any] = {k: n for k, n in values.items() if getattr(cfg, k) is None}
    if cfg.guess_alone_rows is None:
        is_open = cfg.guess_rows is None and device_type != "cpu"
        rows = cfg.guess_rows or values["guess_rows"]
        left["guess_alone_rows"] = GUESS_ALONE_ROWS if is_open else rows
    if cfg.share_chunks is None:  # as kernels/dispatch.has_triton, without torch
        left["share_chunks"] = device_type == "cuda" and find_spec("triton") is not None
    if cfg.overlap_steps is None:
        left["overlap_steps"] = device_type == "cuda"
    if cfg.exact:  # recorded steps cut the keys of a row by how many rows there are
        left["recorded_rows"] = 0
    return replace(cfg, **left)
