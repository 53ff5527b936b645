"""What a pass over one prompt needs on a device, whichever rows it computes.

A device that waits for the host to make tables is idle between the choice of rows and the first
layer. These depend on the prompt alone: they are made while it is still busy with the choice, and
what depends on the rows is picked from them.

Shapes: T tokens of the prompt, N of its reused chunks, R rows, r rotary dims.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kvweave.fuse.protocol import FusionDecoder
from kvweave.fuse.request import ChunkSpan, FuseRequest, State
from kvweave.kernels.host import on_device
from kvweave.kernels.rope import Angles


class ChunkRows(NamedTuple):
    """The rows of some chunks, on the device."""

    spans: list[ChunkSpan]
    chunk: Tensor  # [N] which of the chunks each row belongs to
    row: Tensor  # [N] its position
    turn: Angles  # [N, 1, r/2] of its position


def rows_of_chunks(spans: list[ChunkSpan], device: torch.device) -> tuple[Tensor, Tensor]:
    """Chunk and position [N] of every row of these chunks. Does not wait for the device."""
    starts, ends = torch.tensor([(span.start, span.end) for span in spans]).T
    sizes = ends - starts
    sent = on_device(torch.stack([sizes, ends - sizes.cumsum(0)]), device)
    num_rows = sum(span.num_tokens for span in spans)
    chunk = torch.repeat_interleave(sent[0], output_size=num_rows)
    row = sent[1].index_select(0, chunk)
    row += torch.arange(num_rows, device=device)
    return chunk, row


class PassTables:
    """Made once per prompt, on its thread."""

    def __init__(self, decoder: FusionDecoder, request: FuseRequest) -> None:
        device = decoder.device
        ids = request.ids.copy()  # torch wants to be able to write there
        self.ids = on_device(torch.from_numpy(ids), device)  # [T]
        self.angles = decoder.angles(torch.arange(len(ids), device=device))  # [T, 1, r/2]
        reused = [span for span in request.spans if span.state is State.REUSED]
        self.reused: ChunkRows | None = None
        if reused:
            chunk, row = rows_of_chunks(reused, device)
            self.reused = ChunkRows(reused, chunk, row, self.angles_at(row))

    def angles_at(self, positions: Tensor) -> Angles:
        """Return the angles of some positions [R] on the device, as `decoder.angles` does."""
        cos, sin = (x.index_select(0, positions) for x in self.angles)
        return Angles(cos, sin)
