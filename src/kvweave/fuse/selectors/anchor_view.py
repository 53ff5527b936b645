"""The context as its anchors: the preamble whole, and a few stored tokens of every chunk."""

import torch
from torch import Tensor

from kvweave.errors import RequestError
from kvweave.fuse.anchors import Anchors, extra_name, look_into, unpack_anchors
from kvweave.fuse.protocol import Projected
from kvweave.fuse.selectors.base import Scene
from kvweave.kernels.host import on_device
from kvweave.kernels.rope import Angles, rotate
from kvweave.kv.keys import ChunkKey


class AnchorView:
    """Anchors at their true positions in this prompt. Reads nothing but the extras.

    On the way to a GPU all layers below `depth` are copied at once, ahead of any chunk KV.
    """

    def __init__(self, scene: Scene, rule: str, depth: int) -> None:
        self._scene = scene
        name = extra_name(rule)
        blobs = scene.stitched.tensors_beside(name)
        found: dict[ChunkKey, Anchors] = {}
        if blobs is None:
            beside = scene.stitched.beside(name)
            found = {key: unpack_anchors(blob) for key, blob in beside.items()}
        else:
            found = {key: look_into(blob) for key, blob in blobs.items()}
        if any(span.key not in found for span in scene.request.placed):
            raise RequestError(
                f"strategy 'qcfuse' needs {rule} anchors beside the chunk KV; "
                f"store them with `kvweave ingest --kv --extras {name}`"
            )
        self._chunks = [(span.start, found[span.key]) for span in scene.request.placed]
        device = scene.decoder.device
        self._there: tuple[Tensor, Tensor] | None = None  # [depth, all anchors, Hk, D] each
        if device.type == "cuda" and depth and self._chunks:
            all_ = [anchors for _, anchors in self._chunks]
            self._there = (
                _side_by_side([a.keys[:depth] for a in all_], device),
                _side_by_side([a.values[:depth] for a in all_], device),
            )
        scene.stitched.begin()

    def with_question(self, layer: int, fresh: Projected, turn: Angles) -> None:
        return None  # anchors are compact

    def context(self, layer: int) -> tuple[Tensor, Tensor, Tensor] | None:
        request, stitched = self._scene.request, self._scene.stitched
        positions = [torch.arange(request.preamble_len)]
        positions += [start + anchors.indices[layer] for start, anchors in self._chunks]
        at = torch.cat(positions)
        if not len(at):
            return None
        decoder, num_front = self._scene.decoder, request.preamble_len
        front = stitched.preamble(layer)
        dtype = None if front is None else front.k.dtype
        if self._there is not None:
            keys, values = (x[layer] for x in self._there)
        else:
            keys = torch.cat([anchors.keys[layer] for _, anchors in self._chunks])
            values = torch.cat([anchors.values[layer] for _, anchors in self._chunks])
        angles = decoder.angles(on_device(at[num_front:], decoder.device))
        dtype = dtype or angles.cos.dtype
        turned = rotate(keys.to(decoder.device, dtype), angles)
        values = values.to(decoder.device, dtype)
        if front is None:
            return turned, values, at
        return torch.cat([front.k, turned]), torch.cat([front.v, values]), at


def _side_by_side(parts: list[Tensor], device: torch.device) -> Tensor:
    """[L, A, Hk, D] of every chunk, on the host, as [L, all A, Hk, D] on the device."""
    layers, _, heads, dim = parts[0].shape
    total = sum(part.shape[1] for part in parts)
    out = torch.empty(layers, total, heads, dim, dtype=parts[0].dtype, device=device)
    at = 0
    for part in parts:
        out[:, at : at + part.shape[1]].copy_(part, non_blocking=True)
        at += part.shape[1]
    return out
