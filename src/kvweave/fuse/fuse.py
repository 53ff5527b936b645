"""Fusion of one prompt: choose rows, recompute them, leave fused KV behind.

    stitch → select → recompute, layer by layer

The one place where selectors, before or in flight, meet the pass.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvweave.fuse.drift import Mover, make_mover
from kvweave.fuse.fused_pass import LayerLook, PassResult, fused_pass
from kvweave.fuse.protocol import Meanwhile
from kvweave.fuse.record import PassTrace, ScoredHits
from kvweave.fuse.request import FuseRequest, State, check_ratio
from kvweave.fuse.selector import AnySelector, InFlightChoice, Scene
from kvweave.fuse.stitched import Stitched, positions_of
from kvweave.fuse.strategy import REUSE, Strategy
from kvweave.fuse.taper import TaperedRows
from kvweave.kernels.host import Returning


class FirstToken(NamedTuple):
    """The likeliest token behind a prompt."""

    token_id: int
    lead: float  # of its logit over the next one's


@dataclass(frozen=True, slots=True, eq=False)
class Fused:
    """A prefilled prompt and how it was made."""

    logits: Tensor  # [V] of the last token
    first: FirstToken | None  # None: on a CPU nobody waits for it, or the logits are no numbers
    recomputed: tuple[int, ...]  # hits, ascending; some may have left before the last layers
    rows_per_layer: tuple[int, ...]
    work: float  # rows through layers, the probe's included, as a share of full prefill's
    select_s: float  # choosing rows before the pass, probe included
    pass_s: float
    load_s: float  # waiting for chunk KV and decoding it; in neither of the other two
    trace: PassTrace


def fuse(stitched: Stitched, strategy: Strategy = REUSE, ratio: float = 0.0) -> Fused:
    """Prefill the request of `stitched` into its buffer, recomputing `ratio` of its hits.

    Without a selector nothing is recomputed. Ratio 1 recomputes everything, whatever the selector.
    Drift wants a selector that chooses before the pass. Raises ChunkLost as the pass does.
    """
    return order_fusion(stitched, strategy, ratio).finish()


@torch.inference_mode()
def order_fusion(
    stitched: Stitched,
    strategy: Strategy,
    ratio: float,
    told: Callable[[tuple[int, ...]], None] | None = None,
    meanwhile: Meanwhile | None = None,
) -> "OrderedFusion":
    """Order a fusion with the arguments of `fuse`, up to where the host would wait for the pass.

    The device may be given other work before the fusion is finished. `told` is called with the hits
    that are recomputed when the pass is ordered: a device is still at it.
    """
    decoder, request = stitched.decoder, stitched.request
    started_s = time.perf_counter()
    scoring = None if meanwhile is None else meanwhile.scoring
    selected = select_rows(stitched, strategy, ratio, scoring)
    mover: Mover | None = None
    if strategy.drift and selected.is_partial:
        assert selected.in_flight is None, "drift is known only for rows that run from the start"
        chosen, leaving = selected.chosen, selected.leaving
        mover = make_mover(
            decoder, request, chosen, strategy.drift, leaving, stitched.tables,
            keeps=stitched.layers.keeps_shifts,
        )  # fmt: skip
    chosen_s, loaded_s = time.perf_counter(), stitched.layers.load_s
    passed = fused_pass(
        stitched,
        selected.rows,
        in_flight=selected.in_flight,
        leaving=selected.leaving,
        drift=mover,
    )
    # on its way before the device is waited for
    best = Returning(_best(passed.logits)) if decoder.device.type == "cuda" else None
    if mover is not None:
        stitched.layers.keep_shifts(mover.shifts)
    recomputed = _recomputed_hits(passed, request, selected)  # while the device is still at it
    ordered = OrderedFusion(
        stitched,
        passed,
        best,
        recomputed,
        work_of(stitched, strategy, selected, passed.rows_per_layer),
        Moments(started_s, chosen_s, loaded_s),
        tuple(selected.scored),
        scored_layers(strategy, decoder.spec.num_layers),
    )
    if told is not None:
        told(recomputed)
    if meanwhile is not None:
        meanwhile.computing()
    return ordered


class Moments(NamedTuple):
    """Times of one fusion, by time.perf_counter."""

    started_s: float
    chosen_s: float
    loaded_s: float  # seconds until then that it waited for chunk KV


@dataclass(frozen=True, slots=True, eq=False)
class OrderedFusion:
    """A fusion whose pass is ordered."""

    stitched: Stitched
    passed: PassResult
    best: Returning | None
    recomputed: tuple[int, ...]
    work: float
    moments: Moments
    scored: tuple[ScoredHits, ...]
    scored_layers: tuple[int, ...]

    @property
    def is_through(self) -> bool:
        """Whether the device has finished the pass."""
        return self.best is None or self.best.is_there

    def finish(self) -> Fused:
        """Wait for the pass."""
        first = None if self.best is None else _first_of(self.best.wait())
        finished_s, load_s = time.perf_counter(), self.stitched.layers.load_s
        started_s, chosen_s, loaded_s = self.moments
        passed = self.passed
        return Fused(
            passed.logits,
            first,
            self.recomputed,
            passed.rows_per_layer,
            self.work,
            chosen_s - started_s - loaded_s,
            finished_s - chosen_s - (load_s - loaded_s),
            load_s,
            PassTrace(
                started_s,
                chosen_s,
                finished_s,
                passed.rows_per_layer,
                passed.times,
                self.scored,
                self.scored_layers,
            ),
        )


def _best(logits: Tensor) -> Tensor:
    """The two highest of logits [V] and the token of the highest, [3]: float64 has room for any
    token id."""
    best = logits.max(dim=-1)  # one that is no number, where there are some
    second = logits.topk(2).values[1]  # of equal ones `topk` may take another than `max` first
    return torch.stack([x.double() for x in (best.values, second, best.indices)])


def _first_of(best: Tensor) -> FirstToken | None:
    highest, second, token_id = best.tolist()
    return FirstToken(int(token_id), highest - second) if math.isfinite(highest) else None


@dataclass(frozen=True, slots=True, eq=False)
class SelectedRows:
    """The rows of one prefill."""

    hits: Tensor  # [H] positions on the host, ascending, as the others
    chosen: Tensor  # [C] hits that start the pass
    rows: Tensor  # [R] these, missing chunks and the question
    in_flight: "_HitFilter | None"  # narrows them down on the way
    is_partial: bool  # some hits are recomputed and some are not: a selector was asked
    leaving: TaperedRows | None  # most of the chosen ones stop early
    scored: list[ScoredHits]  # what they were chosen by; grows while rows are narrowed in flight


def select_rows(
    stitched: Stitched,
    strategy: Strategy,
    ratio: float,
    scoring: Callable[[], None] | None = None,
) -> SelectedRows:
    """Choose the rows to compute, with the arguments of `fuse`. May probe, and lay the layers that
    needs."""
    check_ratio(ratio)
    request, selector, taper = stitched.request, strategy.selector, strategy.taper
    hits = positions_of(request.runs(State.REUSED))
    must_compute = positions_of(request.to_compute)
    scene = Scene(stitched, hits, scoring=scoring)
    count = strategy.num_rows([span.num_tokens for span in scene.fused], ratio)
    is_partial = 0 < count < len(hits)
    if taper is not None and not (is_partial and taper.applies(stitched.decoder.spec.num_layers)):
        taper = None  # what is recomputed as a whole is exact
    counts = (count,) if taper is None else (count, taper.staying(count))
    chosen, in_flight = _choose(scene, selector, counts, must_compute)
    leaving = None
    if taper is not None:
        leaving = TaperedRows(taper.layer, chosen[1], _join_rows(chosen[1], must_compute))
    rows = _join_rows(chosen[0], must_compute)
    return SelectedRows(hits, chosen[0], rows, in_flight, is_partial, leaving, scene.scored)


def scored_layers(strategy: Strategy, num_layers: int) -> tuple[int, ...]:
    """Layers whose stored keys or values a strategy looks at to choose rows."""
    needs = strategy.needs(num_layers)
    return tuple(sorted({*needs.key_layers, *needs.value_layers}))


def _join_rows(hits: Tensor, must_compute: Tensor) -> Tensor:
    """Join some hits with what is always computed, ascending as both are."""
    rows = np.concatenate([hits.numpy(), must_compute.numpy()])
    if len(hits) and rows[len(hits)] < rows[len(hits) - 1]:  # missing chunks between them
        rows.sort()
    return torch.from_numpy(rows)


def _choose(
    scene: Scene, selector: AnySelector | None, counts: Sequence[int], must_compute: Tensor
) -> tuple[list[Tensor], "_HitFilter | None"]:
    """For each count the hits that start the pass, and what narrows them down in it."""
    if selector is None or counts[0] in (0, len(scene.hits)):
        return [scene.hits[:count] for count in counts], None
    if selector.in_flight:
        assert len(counts) == 1, "rows that are chosen in flight do not leave early"
        return [scene.hits], _HitFilter(selector.begin(scene, counts[0]), must_compute)
    chosen = selector.select(scene, counts)
    for rows, count in zip(chosen, counts, strict=True):
        assert len(rows) == count, f"{selector} chose {len(rows)} of {count}"
    return chosen, None


def work_of(
    stitched: Stitched, strategy: Strategy, selected: SelectedRows, rows_per_layer: Sequence[int]
) -> float:
    """Rows through layers, the probe's included, as a share of full prefill's."""
    request, num_layers = stitched.request, stitched.decoder.spec.num_layers
    rows = sum(rows_per_layer)
    if selected.is_partial:
        needs = strategy.needs(num_layers)
        if needs.probe != "none":
            rows += needs.probe_depth * (len(request.prompt_ids) - request.question_start)
    return rows / (num_layers * len(request.prompt_ids))


def _recomputed_hits(
    passed: PassResult, request: FuseRequest, selected: SelectedRows
) -> tuple[int, ...]:
    """Return the hits that were recomputed: where the pass narrowed them down, the ones left."""
    if selected.in_flight is None:
        return tuple(selected.chosen.tolist())
    is_hit = torch.zeros(len(request.prompt_ids), dtype=torch.bool)
    is_hit[selected.hits] = True
    left = torch.tensor(passed.rows, dtype=torch.int64)
    return tuple(left[is_hit[left]].tolist())


class _HitFilter:
    """A RowFilter: a selector narrows the hits; missing chunks and the question always go on."""

    def __init__(self, choice: InFlightChoice, always: Tensor) -> None:
        self._choice = choice
        self._always = always

    def narrow(self, look: LayerLook) -> Tensor | None:
        keep = self._choice.choose(look)
        if keep is None:
            return None
        positions = torch.cat([keep, self._always]).sort().values
        return torch.searchsorted(look.positions, positions)
