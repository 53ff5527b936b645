"""Codecs: sizes known beforehand, no copy for raw."""

import pytest
import torch

from kvweave.errors import ConfigError
from kvweave.kv.format.codec import CODECS, LayerKV, dtype_name, is_lossless, open_codec
from kvweave.kv.format.header import LayerShape
from kvweave.kv.format.objects import layer_of, pack_chunk
from worlds.kv import make_key, make_layers

TOLERANCE = {"raw": 0.0, "fp16": 2e-3, "bf16": 2e-2, "int8": 2e-2, "fp8": 0.2, "int4": 0.3}
# bytes per element of 256 tokens of SmolLM2's shape, parameters included
BYTES_PER_ELEMENT = {"raw": 4, "fp16": 2, "bf16": 2, "int8": 1.0625, "fp8": 1.03125, "int4": 0.5625}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("codec", CODECS)
def test_every_codec_gives_back_about_what_it_got(codec: str, dtype: str) -> None:
    layers = make_layers(num_tokens=70, dtype=dtype)
    chunk = pack_chunk(make_key(), layers, codec)
    for i, want in enumerate(layers):
        got = layer_of(chunk.header, chunk.memory, i).decode()
        assert got.k.dtype == want.k.dtype
        torch.testing.assert_close(got.k, want.k, rtol=0.01, atol=TOLERANCE[codec])
        torch.testing.assert_close(got.v, want.v, rtol=0.01, atol=TOLERANCE[codec])


def test_raw_decodes_without_a_copy() -> None:
    chunk = pack_chunk(make_key(), make_layers())
    encoded = layer_of(chunk.header, chunk.memory, 0)
    assert encoded.decode().k.data_ptr() == encoded.data.data_ptr()


@pytest.mark.parametrize("codec", CODECS)
def test_sizes_are_known_from_the_shape(codec: str) -> None:
    shape = LayerShape(256, 3, 64, "float32")
    size = open_codec(codec).num_bytes(shape)
    assert size / (2 * 256 * 3 * 64) == BYTES_PER_ELEMENT[codec]


def test_what_fp16_cannot_hold_is_refused() -> None:
    layers = make_layers()
    layers[1].k[0, 0, 0] = 1e5
    with pytest.raises(ValueError, match="use raw or bf16"):
        pack_chunk(make_key(), layers, "fp16")


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("shape", [(1, 1, 6), (3, 1, 2), (1, 3, 10)])
def test_odd_numbers_of_code_bytes_decode(codec: str, shape: tuple[int, int, int]) -> None:
    kv = LayerKV(torch.randn(shape), torch.randn(shape))
    chunk = pack_chunk(make_key(), [kv], codec)
    got = layer_of(chunk.header, chunk.memory, 0).decode()
    torch.testing.assert_close(got.k, kv.k, rtol=0.07, atol=TOLERANCE[codec])
    torch.testing.assert_close(got.v, kv.v, rtol=0.07, atol=TOLERANCE[codec])


@pytest.mark.parametrize("codec", CODECS)
def test_a_chunk_without_tokens_is_refused(codec: str) -> None:
    empty = LayerKV(torch.randn(0, 1, 8), torch.randn(0, 1, 8))
    with pytest.raises(ValueError, match="nothing to store"):
        pack_chunk(make_key(), [empty], codec)


def test_int4_refuses_an_odd_head_dim() -> None:
    odd = LayerKV(torch.randn(4, 1, 7), torch.randn(4, 1, 7))
    with pytest.raises(ValueError, match="even head dim"):
        pack_chunk(make_key(), [odd], "int4")


def test_unknown_codecs_and_dtypes_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="no codec 'zip'; known: raw"):
        open_codec("zip")
    with pytest.raises(ConfigError, match="float64"):
        dtype_name(torch.float64)


@pytest.mark.parametrize("num_tokens", [1, 63, 130])
@pytest.mark.parametrize("codec", CODECS)
def test_layers_encoded_together_have_the_bytes_of_layers_one_by_one(
    codec: str, num_tokens: int
) -> None:
    layers, how = make_layers(num_tokens=num_tokens), open_codec(codec)
    shape = LayerShape(*layers[0].k.shape, dtype_name(layers[0].k.dtype))
    one_by_one = torch.empty(len(layers), how.num_bytes(shape), dtype=torch.uint8)
    for kv, row in zip(layers, one_by_one, strict=True):
        how.encode(kv, row)
    padded = torch.zeros(len(layers), -(-how.num_bytes(shape) // 4096) * 4096, dtype=torch.uint8)
    how.encode_joined(layers, padded[:, : how.num_bytes(shape)])
    assert torch.equal(padded[:, : how.num_bytes(shape)], one_by_one)
    assert not padded[:, how.num_bytes(shape) :].any()


@pytest.mark.gpu
@pytest.mark.parametrize("codec", CODECS)
def test_a_gpu_encodes_and_decodes_like_a_cpu(codec: str) -> None:
    layers = make_layers(num_tokens=70)
    here = pack_chunk(make_key(), layers, codec)
    there = pack_chunk(make_key(), [LayerKV(k.cuda(), v.cuda()) for k, v in layers], codec)
    assert bytes(here.view) == bytes(there.view)
    encoded = layer_of(here.header, here.memory, 0)
    on_gpu = encoded._replace(data=encoded.data.cuda()).decode()
    torch.testing.assert_close(on_gpu.k.cpu(), encoded.decode().k, rtol=1e-6, atol=1e-6)


def test_only_codecs_that_keep_every_bit_are_lossless() -> None:
    assert is_lossless("raw", "float32")
    assert is_lossless("bf16", "bfloat16")
    assert not is_lossless("bf16", "float32")
    assert not is_lossless("int8", "float32")
