"""Inter-attention against attention written out over the whole text."""

import math
from pathlib import Path

import pytest
import torch

from kvweave.fuse.encode.chunk_pass import encode_chunks, encode_prefix
from kvweave.fuse.encode.extras import inter_attention
from kvweave.kernels.rope import rotate
from kvweave.model.load import load_decoder
from worlds.fuse import CHUNKS, PREAMBLE
from worlds.tiny_models import make_model_folder


@pytest.mark.parametrize("variant", ["llama", "qwen3", "mixtral"])
@torch.inference_mode()
def test_inter_attention_is_what_a_token_gives_to_keys_outside_its_chunk(
    tmp_path: Path, variant: str
) -> None:
    folder = make_model_folder(tmp_path, variant)
    decoder = load_decoder(folder, device="cpu", dtype="float32")
    for preamble, chunk in ((PREAMBLE, CHUNKS[2]), (PREAMBLE, CHUNKS[1]), ([], CHUNKS[0])):
        ids, at = torch.tensor([*preamble, *chunk]), torch.arange(len(preamble) + len(chunk))
        h, angles = decoder.embed(ids), decoder.angles(at)
        for layer in range(decoder.spec.num_layers):
            q, k, v = decoder.qkv(layer, h)
            group = q.shape[1] // k.shape[1]
            q, k = rotate(q, angles), rotate(k, angles).repeat_interleave(group, dim=1)
            logits = torch.einsum("rhd,nhd->hrn", q, k) / math.sqrt(q.shape[-1])
            p = logits.masked_fill(at > at[:, None], -torch.inf).softmax(-1)
            o = torch.einsum("hrn,nhd->rhd", p, v.repeat_interleave(group, dim=1))
            h = decoder.finish(layer, h, o)
        want = p[:, len(preamble) :, : len(preamble)].sum((0, 2))
        prefix = encode_prefix(decoder, preamble)
        (made,) = encode_chunks(decoder, prefix, [chunk])
        ours = inter_attention(decoder, prefix, chunk, made)
        torch.testing.assert_close(ours, want, atol=1e-4, rtol=1e-4)
