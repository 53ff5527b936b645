"""Fusion of one prompt: choose rows, recompute them, leave fused KV behind.

    stitch → select → recompute, layer by layer

The one place where selectors, before or in flight, meet the pass.
"""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from kvweave.errors import RequestError
from kvweave.fuse.drift import Drift
from kvweave.fuse.fused_pass import LayerLook, Mask, Passed, fused_pass
from kvweave.fuse.protocol import Decoder, KVBuffer
from kvweave.fuse.request import FuseRequest, State, budget
from kvweave.fuse.selectors.base import InFlightSelector, Narrowing, Scene, Selector
from kvweave.fuse.stitched import Stitched, positions_of


@dataclass(frozen=True, slots=True, eq=False)
class Fused:
    """A prefilled prompt and how it was made."""

    logits: Tensor  # [V] of the last token
    recomputed: tuple[int, ...]  # hits that ran through every layer, ascending
    rows_per_layer: tuple[int, ...]
    work: float  # rows through layers, the probe's included, as a share of full prefill's
    select_s: float  # choosing rows before the pass, probe included
    pass_s: float
    load_s: float  # waiting for chunk KV and decoding it; in neither of the other two


@torch.inference_mode()
def fuse(
    decoder: Decoder,
    request: FuseRequest,
    stitched: Stitched,
    kv: KVBuffer,
    selector: Selector | InFlightSelector | None = None,
    ratio: float = 0.0,
    *,
    drift: float = 0.0,
    mask: Mask = "exact",
) -> Fused:
    """Prefill `request` into `kv`, recomputing `ratio` of its hits as `selector` chooses.

    Without a selector nothing is recomputed. Ratio 1 recomputes everything, whoever chooses.
    `drift` moves the rest of each chunk by that part of the mean change (see drift.py); it wants a
    selector that chooses before the pass. Raises ChunkLost as the pass does.
    """
    check_ratio(ratio)
    started_s = time.perf_counter()
    hits = positions_of(request.runs(State.REUSED))
    must_compute = positions_of(request.to_compute)
    count = budget(len(hits), ratio) if selector is not None else 0
    scene = Scene(decoder, request, stitched, hits)
    chosen, in_flight = _choose(scene, selector, count, must_compute)
    rows = torch.cat([chosen, must_compute]).sort().values
    mover = None
    if drift and 0 < count < len(hits):
        assert in_flight is None, "drift is known only for rows that run from the start"
        mover = Drift(decoder, request, chosen, drift)
    chosen_s, loaded_s = time.perf_counter(), stitched.load_s
    passed = fused_pass(
        decoder, request, stitched, rows, kv, in_flight=in_flight, drift=mover, mask=mask
    )
    recomputed = _hits_among(passed, request, hits)  # while the device is still at it
    work = _work(decoder, request, passed, selector if 0 < count < len(hits) else None)
    if decoder.device.type == "cuda":
        torch.cuda.synchronize(decoder.device)  # the caller draws from the logits next anyway
    finished_s = time.perf_counter()
    return Fused(
        passed.logits,
        recomputed,
        passed.rows_per_layer,
        work,
        chosen_s - started_s - loaded_s,
        finished_s - chosen_s - (stitched.load_s - loaded_s),
        stitched.load_s,
    )


def check_ratio(ratio: float) -> None:
    """Raise RequestError unless it is a share."""
    if not 0.0 <= ratio <= 1.0:
        raise RequestError(f"ratio {ratio:g} is no share; give one from 0 to 1, such as 0.15")


def _choose(
    scene: Scene,
    selector: Selector | InFlightSelector | None,
    count: int,
    must_compute: Tensor,
) -> tuple[Tensor, "_HitsOnly | None"]:
    """Hits that start the pass, and who narrows them down in it."""
    if selector is None or count in (0, len(scene.hits)):
        return scene.hits[:count], None
    if hasattr(selector, "begin"):
        return scene.hits, _HitsOnly(selector.begin(scene, count), must_compute)
    chosen = selector.select(scene, count)
    assert len(chosen) == count, f"{selector} chose {len(chosen)} of {count}"
    return chosen, None


def _work(
    decoder: Decoder,
    request: FuseRequest,
    passed: Passed,
    selector: Selector | InFlightSelector | None,
) -> float:
    num_layers = decoder.spec.num_layers
    rows = sum(passed.rows_per_layer)
    if selector is not None and (needs := selector.needs(num_layers)).probe != "none":
        rows += needs.probe_depth * (len(request.prompt_ids) - request.question_start)
    return rows / (num_layers * len(request.prompt_ids))


def _hits_among(passed: Passed, request: FuseRequest, hits: Tensor) -> tuple[int, ...]:
    is_hit = torch.zeros(len(request.prompt_ids), dtype=torch.bool)
    is_hit[hits] = True
    recomputed = torch.tensor(passed.recomputed, dtype=torch.int64)
    return tuple(recomputed[is_hit[recomputed]].tolist())


class _HitsOnly:
    """Lets a selector narrow the hits while misses and the question always go on."""

    def __init__(self, narrowing: Narrowing, always: Tensor) -> None:
        self._narrowing = narrowing
        self._always = always

    def narrow(self, look: LayerLook) -> Tensor | None:
        keep = self._narrowing.choose(look)
        if keep is None:
            return None
        positions = torch.cat([keep, self._always]).sort().values
        return torch.searchsorted(look.positions, positions)
