"""The context as a probe sees it: everything that is stitched, or the preamble and a few stored
tokens of every chunk."""

import torch
from torch import Tensor

from kvweave.fuse.encode.extras import Anchors, view_anchors
from kvweave.fuse.probe import LaidContext
from kvweave.fuse.protocol import Projected
from kvweave.fuse.selector import Scene
from kvweave.fuse.sources import ChunkLost
from kvweave.kernels.host import on_device
from kvweave.kernels.place import place
from kvweave.kernels.rope import Angles, rotate
from kvweave.kv.format.keys import ChunkKey


class FullView:
    """Everything that is stitched."""

    front = None

    def __init__(self, scene: Scene) -> None:
        self._stitched = scene.stitched
        before = torch.arange(scene.request.preamble_len)
        self._positions = torch.cat([before, scene.stitched.placed])
        self._num_tokens = len(scene.request.prompt_ids)
        self._whole = len(self._positions) == scene.request.question_start
        self._at: tuple[Tensor, Tensor] | None = None  # the question's rows: host, device

    def context(self, layer: int) -> tuple[Tensor, Tensor, Tensor] | None:
        if not len(self._positions):
            return None
        keys, values = self._stitched.keys(layer), self._stitched.values(layer)
        if self._whole:  # no missing chunk in between: a view will do
            end = len(self._positions)
            return keys[:end], values[:end], self._positions
        at = on_device(self._positions, keys.device)
        return keys[at], values[at], self._positions

    def with_question(self, layer: int, fresh: Projected, turn: Angles) -> LaidContext | None:
        start, end = len(self._positions), self._num_tokens
        if not self._whole or len(fresh.k) != end - start:
            return None
        keys, values = self._stitched.keys(layer), self._stitched.values(layer)
        if self._at is None:
            rows = torch.arange(start, end)
            self._at = rows, on_device(rows, keys.device)
        q = place(fresh.q, fresh.k, fresh.v, turn, self._at[1], keys, values)
        return LaidContext(q, keys[start:end], keys, values, self._at[0])


class AnchorView:
    """Anchors at their true positions in this prompt. Reads nothing but the extras.

    All layers below `depth` are laid at once, with room for the question behind them: on a GPU a
    few orders instead of a dozen per layer, and ahead of any chunk KV.

    Shapes: A anchors of all chunks, P preamble tokens, U question rows, Hk KV heads, D head dim.
    """

    front = None

    def __init__(self, scene: Scene, name: str, depth: int) -> None:
        """`name` is that of the extra. Raises ChunkLost where chunks are without it."""
        request = scene.request
        found = _stored_anchors(scene, name)
        chunks = [(span.start, found[span.key]) for span in request.placed]
        positions = [start + anchors.indices[:depth] for start, anchors in chunks]
        front = torch.arange(request.preamble_len).expand(depth, -1)
        self._positions = torch.cat([front, *positions], dim=1)  # [depth, P + A] on the host
        self._question = len(request.prompt_ids) - request.question_start
        self._at: tuple[Tensor, Tensor] | None = None  # its rows behind them: host, device
        self._keys, self._values = self._lay(scene, [anchors for _, anchors in chunks], depth)
        scene.stitched.layers.begin()

    def _lay(self, scene: Scene, chunks: list[Anchors], depth: int) -> tuple[Tensor, Tensor]:
        """[depth, P + A + U, Hk, D] each, keys turned; nothing yet where the question comes."""
        decoder, front = scene.decoder, scene.request.preamble_len
        end = self._positions.shape[1]
        shape = (2, depth, end + self._question, decoder.spec.num_kv_heads, decoder.spec.head_dim)
        keys, values = torch.empty(shape, dtype=decoder.dtype, device=decoder.device)
        before = [scene.stitched.preamble(layer) for layer in range(depth)] if front else []
        for laid, stored in (
            (keys, [kv.k for kv in before if kv is not None]),
            (values, [kv.v for kv in before if kv is not None]),
        ):
            if stored:
                torch._foreach_copy_([x[:front] for x in laid], stored)
        if depth and end > front:
            here = _side_by_side(
                [a.keys[:depth] for a in chunks], [a.values[:depth] for a in chunks], decoder.device
            )
            at = on_device(self._positions[:, front:].flatten(), decoder.device)
            turned = rotate(here[0].to(decoder.dtype).flatten(0, 1), decoder.angles(at))
            keys[:, front:end] = turned.view(depth, end - front, *shape[3:])
            values[:, front:end] = here[1]
        return keys, values

    def context(self, layer: int) -> tuple[Tensor, Tensor, Tensor] | None:
        end = self._positions.shape[1]
        if not end:
            return None
        return self._keys[layer, :end], self._values[layer, :end], self._positions[layer]

    def with_question(self, layer: int, fresh: Projected, turn: Angles) -> LaidContext | None:
        """Return the anchors with the question behind them. All anchors stand before the question:
        laid side by side, a row sees what is left of it, wherever the anchors of a layer come
        from."""
        if len(fresh.k) != self._question:
            return None
        keys, values = self._keys[layer], self._values[layer]
        if self._at is None:
            rows = torch.arange(self._positions.shape[1], len(keys))
            self._at = rows, on_device(rows, keys.device)
        q = place(fresh.q, fresh.k, fresh.v, turn, self._at[1], keys, values)
        return LaidContext(q, keys[-self._question :], keys, values, self._at[0])


def _stored_anchors(scene: Scene, name: str) -> dict[ChunkKey, Anchors]:
    """Return the anchors of every placed chunk. Raises ChunkLost if some have none."""
    found = {key: view_anchors(blob) for key, blob in scene.stitched.layers.extras(name).items()}
    if without := [span.key for span in scene.request.placed if span.key not in found]:
        raise ChunkLost(without)
    return found


def _side_by_side(
    keys: list[Tensor], values: list[Tensor], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Join [L, A, Hk, D] of every chunk on the host to [L, all A, Hk, D] on the device."""
    parts = [*keys, *values]
    if device.type != "cpu":  # as they lie, and put in order there
        sizes = [part.numel() for part in parts]
        landed = torch.empty(sum(sizes), dtype=parts[0].dtype, device=device)
        pieces = torch.split(landed, sizes)
        there = [x.view(part.shape) for x, part in zip(pieces, parts, strict=True)]
        torch._foreach_copy_(there, parts, non_blocking=True)
        parts = there
    return torch.cat(parts[: len(keys)], dim=1), torch.cat(parts[len(keys) :], dim=1)
