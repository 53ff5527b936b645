"""The probe: push the question through the model over some view of its context.

What a query-aware selector wants to know is which context tokens the question looks at. The views
differ in how much of the context the question's own hidden states have seen on their way up:

    "question"   nothing: the question alone
    "preamble"   the preamble
    "anchors"    the preamble and a few stored tokens of every chunk
    "full"       everything that is stitched

Queries at layer l need context KV of the layers below l only.

Shapes: U question rows, N context keys, Hq query heads, Hk KV heads, D head dim.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvweave.fuse.protocol import FusionDecoder, Projected
from kvweave.fuse.recordings import recordings_of, steps_of
from kvweave.fuse.request import FuseRequest
from kvweave.kernels.attention import attend
from kvweave.kernels.host import on_device
from kvweave.kernels.rope import Angles, rotate
from kvweave.kernels.types import Segment
from kvweave.kv.format.codec import LayerKV


class ContextView(Protocol):
    """The context as a probe sees it."""

    @property
    def front(self) -> Sequence[LayerKV] | None:
        """All that it shows, if that is exact KV in front of everything, or nothing: such a probe
        can be recorded. None: it shows more."""
        ...

    def context(self, layer: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """Keys (turned) [N, Hk, D], values [N, Hk, D], positions [N] on the host; None: nothing."""
        ...

    def with_question(self, layer: int, fresh: Projected, turn: Angles) -> "LaidContext | None":
        """The whole context with these as the question's rows, right behind it.

        None if the view cannot lay them side by side without a copy; `context` is then asked.
        """
        ...


class LaidContext(NamedTuple):
    """One layer of a whole context with its question laid behind it."""

    q: Tensor  # [U, Hq, D] of the question, turned
    k: Tensor  # [U, Hk, D] of the question, turned: a part of `keys`
    keys: Tensor  # [N + U, Hk, D]
    values: Tensor  # [N + U, Hk, D]
    at: Tensor  # [U] on the host: where the question's rows stand in them


class ProbedLayer(NamedTuple):
    """What the question looks like at one layer."""

    q: Tensor  # [U, Hq, D] turned to the probe's positions
    k: Tensor  # [U, Hk, D] turned


class FrontView:
    """The question behind exact KV that is at hand: the preamble's, or nothing."""

    def __init__(self, front: Sequence[LayerKV] = ()) -> None:
        self.front: Sequence[LayerKV] = front  # keys turned; one per layer, or none

    def context(self, layer: int) -> tuple[Tensor, Tensor, Tensor] | None:
        if not self.front:
            return None
        kv = self.front[layer]
        return kv.k, kv.v, torch.arange(len(kv.k))

    def with_question(self, layer: int, fresh: Projected, turn: Angles) -> None:
        return None


@torch.inference_mode()
def probe(
    decoder: FusionDecoder,
    request: FuseRequest,
    view: ContextView,
    layers: Collection[int],
    *,
    rows: range | None = None,
    first_position: int | None = None,
) -> dict[int, ProbedLayer]:
    """Queries and keys of the question at `layers`.

    `rows` are the positions of the question to push (all by default). They stand at their true
    positions, or from `first_position` on. Computes no logits. The question's rows of the request's
    buffer may be written: the pass writes them again.
    """
    rows = rows or range(request.question_start, len(request.prompt_ids))
    start = rows.start if first_position is None else first_position
    if view.front is not None and decoder.can_record:
        asked, known = request.prompt_ids[rows.start : rows.stop], recordings_of(decoder).probes
        played = known.probe(decoder, asked, start, sorted(layers), view.front)
        if played is not None:
            return {layer: ProbedLayer(q, k) for layer, (q, k) in played.items()}
    positions = torch.arange(start, start + len(rows))  # on the host
    angles = decoder.angles(on_device(positions, decoder.device))
    ids = torch.tensor(request.prompt_ids[rows.start : rows.stop])
    steps = steps_of(decoder, decoder.embed(on_device(ids, decoder.device)))
    projected = steps.first()
    found: dict[int, ProbedLayer] = {}
    deepest = max(layers)
    for layer in range(deepest + 1):
        # above the deepest layer nothing attends: what stands there is not asked for
        whole = view.with_question(layer, projected, angles) if layer < deepest else None
        if whole is None:
            q, k = rotate(projected.q, angles), rotate(projected.k, angles)
        else:
            q, k = whole.q, whole.k
        if layer in layers:
            found[layer] = ProbedLayer(q, k)
        if layer == deepest:
            break
        if whole is None:
            segment, at = _segment(view, layer, k, projected.v, positions), positions
        else:
            segment, at = Segment(0, len(k), whole.keys, whole.values), whole.at
        projected = steps.next(layer, attend(q, at, [segment], out=steps.attention_out))
    return found


@torch.inference_mode()
def begin_probe(
    decoder: FusionDecoder,
    question_ids: Sequence[int],
    start: int,
    view: ContextView,
    layers: Collection[int],
) -> None:
    """Order ahead what `probe` will compute of a whole question at `start`, if it is recorded."""
    if view.front is not None and decoder.can_record:
        probes = recordings_of(decoder).probes
        probes.begin(decoder, question_ids, start, sorted(layers), view.front)


def _segment(view: ContextView, layer: int, k: Tensor, v: Tensor, positions: Tensor) -> Segment:
    """What the question's rows look at in one layer, laid behind what the view shows of it."""
    before = view.context(layer)
    if before is None:
        return Segment(0, len(k), k, v, positions)
    keys, values = torch.cat([before[0], k]), torch.cat([before[1], v])
    return Segment(0, len(k), keys, values, torch.cat([before[2], positions]))
