"""The context as its anchors: the preamble whole, and a few stored tokens of every chunk."""

import torch
from torch import Tensor

from kvweave.errors import RequestError
from kvweave.fuse.anchors import Anchors, extra_name, unpack_anchors
from kvweave.fuse.selectors.base import Scene
from kvweave.kernels.rope import rotate


class AnchorView:
    """Anchors at their true positions in this prompt. Reads nothing but the extras."""

    def __init__(self, scene: Scene, rule: str) -> None:
        blobs = scene.stitched.beside(extra_name(rule))
        self._scene = scene
        self._chunks: list[tuple[int, Anchors]] = []
        for span in scene.request.placed:
            if span.key not in blobs:
                raise RequestError(
                    f"strategy 'qcfuse' needs {rule} anchors beside the chunk KV; "
                    f"store them with `kvweave ingest --kv --extras {extra_name(rule)}`"
                )
            self._chunks.append((span.start, unpack_anchors(blobs[span.key])))

    def with_question(self, layer: int, k: Tensor, v: Tensor) -> None:
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
        keys = torch.cat([anchors.keys[layer] for _, anchors in self._chunks])
        values = torch.cat([anchors.values[layer] for _, anchors in self._chunks])
        angles = decoder.angles(at[num_front:].to(decoder.device))
        dtype = dtype or angles.cos.dtype
        turned = rotate(keys.to(decoder.device, dtype), angles)
        values = values.to(decoder.device, dtype)
        if front is None:
            return turned, values, at
        return torch.cat([front.k, turned]), torch.cat([front.v, values]), at
