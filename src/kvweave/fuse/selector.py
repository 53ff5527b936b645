"""The contract of a selector, and what all of them share.

A selector sees one request (a `Scene`) and says which of its hits to recompute. Rules for all:

- candidates are the hits and nothing else: no preamble, no exact span, no miss, no question
- the budget is global over all hits; ties go to the smaller position; scores are float32
- NaN in a score is an error, never a choice
- the same request gives the same rows
- ratio 0, ratio 1 and no hits never reach a selector

Called on the thread that owns the device. Selectors hold no state between requests.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from kvweave.errors import ModelError
from kvweave.fuse.fused_pass import LayerLook
from kvweave.fuse.needs import Needs
from kvweave.fuse.protocol import FusionDecoder
from kvweave.fuse.record import ScoredHits
from kvweave.fuse.request import ChunkSpan, FuseRequest, State
from kvweave.fuse.stitched import Stitched
from kvweave.kernels.host import on_host


@dataclass(frozen=True, slots=True, eq=False)
class Scene:
    """One request, as a selector sees it."""

    stitched: Stitched
    hits: Tensor  # [H] positions on the host, ascending
    scored: list[ScoredHits] = field(default_factory=list)  # by `note`
    # called, if a selector can, while the device scores: see `Meanwhile`
    scoring: Callable[[], None] | None = None

    def note(self, scores: Tensor, positions: Tensor | None = None) -> None:
        """Keep for the record that rows are chosen by these scores [n] of `positions` [n]; None: of
        all hits. They must not be written to again."""
        self.scored.append(ScoredHits(self.hits if positions is None else positions, scores))

    @property
    def decoder(self) -> FusionDecoder:
        return self.stitched.decoder

    @property
    def request(self) -> FuseRequest:
        return self.stitched.request

    @property
    def fused(self) -> tuple[ChunkSpan, ...]:
        """The chunks that the hits belong to."""
        return tuple(s for s in self.request.spans if s.state is State.REUSED)


class Selector(Protocol):
    """Chooses before the pass, from positions, stored KV or a probe."""

    in_flight: ClassVar[Literal[False]]

    def needs(self, num_layers: int) -> Needs: ...

    def select(self, scene: Scene, counts: Sequence[int]) -> list[Tensor]:
        """For each of `counts`, that many of `scene.hits`: positions, ascending, on the host. A
        strategy that tapers asks for two counts: the rows of the smaller one are among the others,
        and matter most."""
        ...


class InFlightSelector(Protocol):
    """Chooses inside the pass: every hit starts, and check layers narrow them down."""

    in_flight: ClassVar[Literal[True]]

    def needs(self, num_layers: int) -> Needs: ...

    def begin(self, scene: Scene, count: int) -> "InFlightChoice":
        """What decides during one pass. May probe first."""
        ...


class InFlightChoice(Protocol):
    """The state of one in-flight selection."""

    def choose(self, look: LayerLook) -> Tensor | None:
        """At `look.layer`: positions of hits that go on, ascending, on the host; None: all."""
        ...


AnySelector = Selector | InFlightSelector


def top_positions(scores: Tensor, positions: Tensor, count: int) -> Tensor:
    """The `count` positions with the highest scores, ascending; ties to the smaller position.

    `scores` [N] belong to `positions` [N] (ascending, on the host).
    """
    return ranked_positions(scores, positions, (count,))[0]


def ranked_positions(
    scores: Tensor,
    positions: Tensor,
    counts: Sequence[int],
    meanwhile: Callable[[], None] | None = None,
) -> list[Tensor]:
    """Return what `top_positions` gives for several counts at once.

    The host waits for all of them together, and for nothing that `meanwhile`, called before that,
    orders.
    """
    scores = scores.float()
    best = torch.sort(scores, descending=True, stable=True).indices
    # sorted here, where the scores are: on the host it would take longer
    orders = [best[:count].sort().values for count in counts]
    # the number of NaN rides along: asked for by itself it would make the host wait twice
    answer = on_host(torch.cat([scores.isnan().sum()[None], *orders]), meanwhile)
    if int(answer[0]):
        raise ModelError(
            "the scores of the stored tokens hold NaN: the model or its chunk KV is broken; "
            "run `kvweave cache verify`, or ask with reuse 'full'"
        )
    sizes = [len(order) for order in orders]
    return [positions[order] for order in torch.split(answer[1:], sizes)]


def scores_of_hits(scene: Scene, placed_scores: Tensor) -> Tensor:
    """Return scores [..., H] of the hits, from scores [..., N] of everything placed."""
    runs: list[tuple[int, int]] = []  # neighbours are one run: a slice each is an order each
    at = 0
    for span in scene.request.placed:
        end = at + span.num_tokens
        if span.state is State.REUSED:
            if runs and runs[-1][1] == at:
                runs[-1] = (runs[-1][0], end)
            else:
                runs.append((at, end))
        at = end
    parts = [placed_scores[..., start:end] for start, end in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
