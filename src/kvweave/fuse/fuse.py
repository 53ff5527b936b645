"""Fusion of one prompt: choose rows, recompute them, leave fused KV behind.

    stitch → select → recompute, layer by layer

The one place where selectors, before or in flight, meet the pass.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvweave.errors import RequestError
from kvweave.fuse.drift import Drift
from kvweave.fuse.fused_pass import LayerLook, Mask, Passed, fused_pass
from kvweave.fuse.protocol import FusionDecoder, KVBuffer
from kvweave.fuse.request import FuseRequest, State, budget
from kvweave.fuse.selectors.base import (
    InFlightSelector,
    Narrowing,
    RankingSelector,
    Scene,
    Selector,
)
from kvweave.fuse.stitched import Stitched, positions_of
from kvweave.fuse.taper import Mover, Relay, Taper, TaperedRows


@dataclass(frozen=True, slots=True, eq=False)
class Fused:
    """A prefilled prompt and how it was made."""

    logits: Tensor  # [V] of the last token
    recomputed: tuple[int, ...]  # hits, ascending; some may have left before the last layers
    rows_per_layer: tuple[int, ...]
    work: float  # rows through layers, the probe's included, as a share of full prefill's
    select_s: float  # choosing rows before the pass, probe included
    pass_s: float
    load_s: float  # waiting for chunk KV and decoding it; in neither of the other two


@torch.inference_mode()
def fuse(
    decoder: FusionDecoder,
    request: FuseRequest,
    stitched: Stitched,
    kv: KVBuffer,
    selector: Selector | InFlightSelector | None = None,
    ratio: float = 0.0,
    *,
    drift: float = 0.0,
    taper: Taper | None = None,
    mask: Mask = "exact",
) -> Fused:
    """Prefill `request` into `kv`, recomputing `ratio` of its hits as `selector` chooses.

    Without a selector nothing is recomputed. Ratio 1 recomputes everything, whoever chooses.
    `drift` moves the rest of each chunk by that part of the mean change (see drift.py); it wants a
    selector that chooses before the pass. With a `taper` most rows leave early; it wants one that
    ranks them. Raises ChunkLost as the pass does.
    """
    started_s = time.perf_counter()
    selected = select_rows(decoder, request, stitched, selector, ratio, taper)
    mover: Mover | None = None
    if drift and selected.is_partial:
        assert selected.in_flight is None, "drift is known only for rows that run from the start"
        mover = Drift(decoder, request, selected.chosen, drift)
        going = selected.leaving
        if going is not None:
            mover = Relay(mover, going.layer, lambda: Drift(decoder, request, going.stay, drift))
    chosen_s, loaded_s = time.perf_counter(), stitched.load_s
    passed = fused_pass(
        decoder,
        request,
        stitched,
        selected.rows,
        kv,
        in_flight=selected.in_flight,
        leaving=selected.leaving,
        drift=mover,
        mask=mask,
    )
    recomputed = _recomputed(passed, request, selected)  # while the device is still at it
    work = work_of(decoder, request, passed.rows_per_layer, selected, selector)
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


@dataclass(frozen=True, slots=True, eq=False)
class Selected:
    """The rows of one prefill."""

    hits: Tensor  # [H] positions on the host, ascending, as the others
    chosen: Tensor  # [C] hits that start the pass
    rows: Tensor  # [R] these, missing chunks and the question
    in_flight: "_HitsOnly | None"  # who narrows them down on the way
    is_partial: bool  # some hits are recomputed and some are not: a selector was asked
    leaving: TaperedRows | None  # most of the chosen ones stop early


def select_rows(
    decoder: FusionDecoder,
    request: FuseRequest,
    stitched: Stitched,
    selector: Selector | InFlightSelector | None,
    ratio: float,
    taper: Taper | None = None,
) -> Selected:
    """Choose the rows to compute; may probe, and lay the layers that needs. As `fuse`."""
    check_ratio(ratio)
    hits = positions_of(request.runs(State.REUSED))
    must_compute = positions_of(request.to_compute)
    count = budget(len(hits), ratio) if selector is not None else 0
    scene = Scene(decoder, request, stitched, hits)
    is_partial = 0 < count < len(hits)
    if taper is not None and not (is_partial and taper.applies(decoder.spec.num_layers)):
        taper = None  # what is recomputed as a whole is exact
    going = None
    if taper is not None:
        assert isinstance(selector, RankingSelector), (
            f"{selector} does not say which of its rows matter"
        )
        chosen, stay = selector.ranked(scene, (count, taper.staying(count)))
        in_flight = None
        going = TaperedRows(taper.layer, stay, _with(stay, must_compute))
    else:
        chosen, in_flight = _choose(scene, selector, count, must_compute)
    rows = _with(chosen, must_compute)
    return Selected(hits, chosen, rows, in_flight, is_partial, going)


def _with(hits: Tensor, must_compute: Tensor) -> Tensor:
    """Some hits and what is always computed, ascending as both are."""
    rows = torch.cat([hits, must_compute])
    if len(hits) and must_compute[0] < hits[-1]:  # missing chunks between them
        rows = rows.sort().values
    return rows


def _choose(
    scene: Scene,
    selector: Selector | InFlightSelector | None,
    count: int,
    must_compute: Tensor,
) -> tuple[Tensor, "_HitsOnly | None"]:
    """Hits that start the pass, and who narrows them down in it."""
    if selector is None or count in (0, len(scene.hits)):
        return scene.hits[:count], None
    if selector.in_flight:
        return scene.hits, _HitsOnly(selector.begin(scene, count), must_compute)
    chosen = selector.select(scene, count)
    assert len(chosen) == count, f"{selector} chose {len(chosen)} of {count}"
    return chosen, None


def work_of(
    decoder: FusionDecoder,
    request: FuseRequest,
    rows_per_layer: Sequence[int],
    selected: Selected,
    selector: Selector | InFlightSelector | None,
) -> float:
    """Rows through layers, the probe's included, as a share of full prefill's."""
    num_layers = decoder.spec.num_layers
    rows = sum(rows_per_layer)
    if selector is not None and selected.is_partial:
        needs = selector.needs(num_layers)
        if needs.probe != "none":
            rows += needs.probe_depth * (len(request.prompt_ids) - request.question_start)
    return rows / (num_layers * len(request.prompt_ids))


def _recomputed(passed: Passed, request: FuseRequest, selected: Selected) -> tuple[int, ...]:
    """Hits that were recomputed: of those that were narrowed in flight, who is left."""
    if selected.in_flight is None:
        return tuple(selected.chosen.tolist())
    is_hit = torch.zeros(len(request.prompt_ids), dtype=torch.bool)
    is_hit[selected.hits] = True
    left = torch.tensor(passed.rows, dtype=torch.int64)
    return tuple(left[is_hit[left]].tolist())


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
