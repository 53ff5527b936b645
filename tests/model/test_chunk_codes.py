"""What key channels are divided by before they share a scale."""

from pathlib import Path

import pytest
import torch

from kvweave.model.load import load_decoder
from kvweave.model.paged_kv import USUAL, KVPool, key_lifts
from worlds.tiny_models import make_model_folder


@pytest.mark.parametrize("variant", ["llama", "qwen3"])
def test_models_without_a_bias_lift_nothing(tmp_path: Path, variant: str) -> None:
    decoder = load_decoder(make_model_folder(tmp_path, variant), device="cpu", dtype="float32")
    assert key_lifts(decoder.spec, decoder.weights) is None


def test_channels_are_lifted_as_their_bias_is_large(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path, "qwen2-yarn")
    decoder = load_decoder(folder, device="cpu", dtype="float32")
    spec, weights = decoder.spec, decoder.weights
    bias = weights.layers[1].qkv.bias  # type: ignore[attr-defined]
    first = spec.num_heads * spec.head_dim
    bias[first : first + spec.num_kv_heads * spec.head_dim] = 0.0
    bias[first + 3] = 30.0
    lifts = key_lifts(spec, weights)
    assert lifts is not None
    assert lifts.shape == (spec.num_layers, spec.num_kv_heads, spec.head_dim)
    half = spec.head_dim // 2
    assert torch.equal(lifts[..., :half], lifts[..., half:]), "what turns together is lifted alike"
    large = (30.0**2 + USUAL**2) ** 0.5
    assert lifts[1, 0, 3].item() == pytest.approx(large)
    assert lifts[1, 0, 3 + half].item() == pytest.approx(large)
    assert lifts[1, 1].flatten().tolist() == [USUAL] * spec.head_dim


@pytest.mark.parametrize(("dtype", "fold"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_codes_and_rows_share_their_bytes(tmp_path: Path, dtype: torch.dtype, fold: int) -> None:
    spec = load_decoder(make_model_folder(tmp_path, "llama"), device="cpu", dtype="float32").spec
    device = torch.device("cpu")
    pool = KVPool(spec, 6, 4, dtype, device, codes_chunks=True)
    coded = pool.codes(1)
    assert coded is not None
    assert coded.keys.shape == (7, fold * 4, spec.num_kv_heads, spec.head_dim // 2)
    assert coded.scales.shape == (7, spec.num_kv_heads, fold * 4, 2)
    assert pool.chunk_page_tokens == fold * 4
    pool.keys[1].zero_()
    coded.keys[3] = 5
    assert bool(pool.keys[1, 3].view(torch.int16).eq(5).all())
    assert not pool.keys[1, [2, 4]].any()
    plain = KVPool(spec, 6, 4, dtype, device)
    assert plain.codes(1) is None
    assert plain.chunk_page_tokens == 4
