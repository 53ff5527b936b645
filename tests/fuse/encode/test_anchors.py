"""Anchors: what is chosen, what KVzip measures, and how blobs refuse to be something else."""

import math
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvweave.errors import ConfigError
from kvweave.fuse.encode.chunk_pass import encode_chunks, encode_prefix
from kvweave.fuse.encode.extras import (
    HEADER,
    NUM_SINKS,
    Anchors,
    anchors_of,
    choose_anchors,
    extra_name,
    knorm_scores,
    kvzip_scores,
    pack_anchors,
    sink_scores,
)
from kvweave.kernels.rope import rotate
from kvweave.kv.format.codec import LayerKV
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from worlds.fuse import CHUNKS, PREAMBLE, REPEAT, make_ids, unpack_anchors
from worlds.tiny_models import make_model_folder


@pytest.fixture(scope="module", params=["llama", "qwen3", "llama-yarn", "mixtral"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = make_model_folder(tmp_path_factory.mktemp("models"), request.param)
    return load_decoder(folder, device="cpu", dtype="float32")


def make_layers(num_tokens: int, num_layers: int = 3, seed: int = 0) -> list[LayerKV]:
    g = torch.Generator().manual_seed(seed)
    return [LayerKV(*torch.randn(2, num_tokens, 2, 4, generator=g)) for _ in range(num_layers)]


# ── choosing ────────────────────────────────────────────────────────────────────────────────────


def test_rule_and_share_stand_in_the_name_of_the_extra() -> None:
    for rule in ("sink", "knorm", "kvzip"):
        for share in (0.1, 0.05, 0.25, 1.0):
            name = extra_name(rule, share)
            assert len(name) <= 32, "what a header has room for"
            assert anchors_of(name) == (rule, share)
    assert extra_name("kvzip") == "anchors:kvzip"


@pytest.mark.parametrize(
    ("num_tokens", "share", "count"),
    [(1, 0.1, 1), (9, 0.1, 1), (10, 0.1, 1), (11, 0.1, 2), (25, 0.1, 3), (7, 1.0, 7), (5, 0.0, 1)],
)
def test_a_chunk_keeps_its_share_rounded_up_and_at_least_one(
    num_tokens: int, share: float, count: int
) -> None:
    layers = make_layers(num_tokens)
    anchors = choose_anchors(layers, sink_scores(layers), share)
    assert anchors.indices.shape == (3, count)
    assert anchors.keys.shape == anchors.values.shape == (3, count, 2, 4)


def test_anchors_are_the_best_of_each_layer_in_order_with_their_own_kv() -> None:
    layers = make_layers(6)
    scores = torch.tensor([[0.0, 9, 0, 8, 0, 0], [5, 5, 5, 5, 5, 5], [0, 0, 0, 0, 1, 2]])
    anchors = choose_anchors(layers, scores, 1 / 3)
    assert anchors.indices.tolist() == [[1, 3], [0, 1], [4, 5]]  # ties to the smaller index
    for layer, indices in enumerate(anchors.indices):
        assert torch.equal(anchors.keys[layer], layers[layer].k[indices])
        assert torch.equal(anchors.values[layer], layers[layer].v[indices])


def test_sink_anchors_are_the_first_tokens() -> None:
    layers = make_layers(20)
    assert choose_anchors(layers, sink_scores(layers)).indices.tolist() == [[0, 1]] * 3


def test_key_norm_anchors_are_the_lowest_norms_or_the_highest() -> None:
    layers = make_layers(20)
    for layer, kv in enumerate(layers):
        kv.k[4 + layer] *= 0.01
        kv.k[12 + layer] *= 100
    low = choose_anchors(layers, knorm_scores(layers), 0.05).indices
    high = choose_anchors(layers, -knorm_scores(layers), 0.05).indices
    assert low.tolist() == [[4], [5], [6]]
    assert high.tolist() == [[12], [13], [14]]


def test_key_norms_do_not_depend_on_the_place_of_a_chunk(decoder: Decoder) -> None:
    (layers,) = encode_chunks(decoder, encode_prefix(decoder, PREAMBLE), [CHUNKS[0]])
    norms = knorm_scores(layers)
    assert norms.shape == (3, len(CHUNKS[0]))
    by_hand = torch.stack([-kv.k.norm(dim=2).mean(dim=1) for kv in layers])
    torch.testing.assert_close(norms, by_hand)
    if decoder.spec.rope.attention_factor == 1.0:
        angles = decoder.angles(torch.arange(40, 40 + len(CHUNKS[0])))
        turned = [LayerKV(rotate(kv.k, angles), kv.v) for kv in layers]
        torch.testing.assert_close(knorm_scores(turned), norms, atol=1e-4, rtol=1e-4)


def test_an_unknown_rule_is_refused_by_name() -> None:
    assert extra_name("sink") == "anchors:sink"
    with pytest.raises(ConfigError, match=r"'norm' is unknown; known: sink, knorm, kvzip"):
        extra_name("norm")


# ── KVzip ───────────────────────────────────────────────────────────────────────────────────────


def dense_kvzip(decoder: Decoder, preamble: list[int], chunk: list[int]) -> Tensor:
    """The whole text run as one prompt, attention written out, the columns of the chunk kept."""
    ids = [*preamble, *chunk, *REPEAT, *chunk]
    first, probe = len(preamble), len(preamble) + len(chunk)
    at = torch.arange(len(ids))
    angles = decoder.angles(at)
    hidden = at > at[:, None]
    h = decoder.embed(torch.tensor(ids))
    scores = []
    counted = [*range(min(NUM_SINKS, first)), *range(first, len(ids))]
    for layer in range(decoder.spec.num_layers):
        q, k, v = decoder.qkv(layer, h)
        group = q.shape[1] // k.shape[1]
        q, k = rotate(q, angles).double(), rotate(k, angles).double()
        k, v = k.repeat_interleave(group, dim=1), v.double().repeat_interleave(group, dim=1)
        logits = torch.einsum("rhd,nhd->hrn", q, k) / math.sqrt(q.shape[-1])
        logits = logits.masked_fill(hidden, -torch.inf)
        shares = logits[:, probe:, counted].softmax(-1)  # only what KVzip's softmax runs over
        from_chunk = min(NUM_SINKS, first)
        scores.append(shares[..., from_chunk : from_chunk + len(chunk)].amax((0, 1)))
        o = torch.einsum("hrn,nhd->rhd", logits.softmax(-1), v)
        h = decoder.finish(layer, h, o.float())
    return torch.stack(scores)


@pytest.mark.parametrize("preamble", [PREAMBLE, PREAMBLE[:2], []])
@torch.inference_mode()
def test_kvzip_scores_equal_attention_written_out(decoder: Decoder, preamble: list[int]) -> None:
    prefix = encode_prefix(decoder, preamble)
    made = encode_chunks(decoder, prefix, CHUNKS)
    together = kvzip_scores(decoder, prefix, CHUNKS, made, REPEAT)
    for chunk, ours in zip(CHUNKS, together, strict=True):
        want = dense_kvzip(decoder, preamble, chunk)
        torch.testing.assert_close(ours.double(), want, atol=1e-4, rtol=1e-4)


def test_a_repetition_ends_where_the_models_positions_do(decoder: Decoder) -> None:
    """Nothing is refused for it: the tokens that fit say what is looked at."""
    prefix, chunk = encode_prefix(decoder, PREAMBLE), CHUNKS[0]
    made = encode_chunks(decoder, prefix, [chunk])
    end = len(PREAMBLE) + len(chunk)
    (whole,) = kvzip_scores(decoder, prefix, [chunk], made, REPEAT)
    fits = {}
    for room in (1, len(REPEAT) + 2, len(REPEAT) + len(chunk)):
        spec = replace(decoder.spec, max_context=end + room)
        short = Decoder(spec, decoder.weights)
        (fits[room],) = kvzip_scores(short, prefix, [chunk], made, REPEAT)
        assert fits[room].shape == whole.shape
        assert bool(fits[room].isfinite().all())
    *less, all_of_it = fits.values()
    torch.testing.assert_close(all_of_it, whole)
    assert all(bool((each <= whole + 1e-6).all()) for each in less), "fewer rows look at the keys"
    assert not torch.allclose(less[0], whole)


def test_kvzip_depends_on_the_text_being_repeated(decoder: Decoder) -> None:
    prefix = encode_prefix(decoder, PREAMBLE)
    (chunk,) = make_ids(9, 12)
    made = encode_chunks(decoder, prefix, [chunk])
    (ours,) = kvzip_scores(decoder, prefix, [chunk], made, REPEAT)
    (other,) = kvzip_scores(decoder, prefix, [[(i + 1) % 97 for i in chunk]], made, REPEAT)
    assert not torch.allclose(ours, other, atol=1e-3)


# ── blobs ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 33])
def test_anchors_come_back_from_a_blob(num_tokens: int, dtype: torch.dtype) -> None:
    layers = [LayerKV(kv.k.to(dtype), kv.v.to(dtype)) for kv in make_layers(num_tokens)]
    anchors = choose_anchors(layers, knorm_scores(layers), 0.3)
    blob = pack_anchors(anchors)
    assert isinstance(blob, bytes)
    back = unpack_anchors(blob)
    assert back.indices.dtype == torch.int64
    assert torch.equal(back.indices, anchors.indices)
    assert torch.equal(back.keys, anchors.keys.half())
    assert torch.equal(back.values, anchors.values.half())
    back.keys.zero_()  # it owns its memory
    assert torch.equal(unpack_anchors(blob).keys, anchors.keys.half())


def test_a_blob_without_anchors_comes_back_empty() -> None:
    nothing = Anchors(torch.zeros(3, 0, dtype=torch.int64), *torch.zeros(2, 3, 0, 2, 4))
    back = unpack_anchors(pack_anchors(nothing))
    assert back.indices.shape == (3, 0)
    assert back.keys.shape == back.values.shape == (3, 0, 2, 4)


def test_bytes_that_are_no_anchors_are_refused() -> None:
    layers = make_layers(20)
    blob = pack_anchors(choose_anchors(layers, sink_scores(layers)))
    for bad in (b"", b"anc1", blob[: HEADER.size - 1], b"anc0" + blob[4:], bytes(len(blob))):
        with pytest.raises(ValueError, match="no anchors"):
            unpack_anchors(bad)
    huge = HEADER.pack(b"anc1", *[65535] * 4) + blob[HEADER.size :]
    longer = struct.pack("<4sHHHH", b"anc1", 3, 3, 2, 4) + blob[HEADER.size :]
    for bad in (blob[:-1], blob + b"\0", blob[: HEADER.size], huge, longer):
        with pytest.raises(ValueError, match="another size"):
            unpack_anchors(bad)


def test_half_precision_anchors_of_a_real_chunk_are_close(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path, "llama")
    decoder = load_decoder(folder, device="cpu", dtype="float32")
    prefix = encode_prefix(decoder, PREAMBLE)
    made = encode_chunks(decoder, prefix, CHUNKS)
    for layers, scores in zip(
        made, kvzip_scores(decoder, prefix, CHUNKS, made, REPEAT), strict=True
    ):
        anchors = choose_anchors(layers, scores)
        back = unpack_anchors(pack_anchors(anchors))
        torch.testing.assert_close(back.keys.float(), anchors.keys, atol=1e-2, rtol=1e-3)


def test_values_beyond_float16_stay_finite_in_the_blob() -> None:
    layers = [LayerKV(torch.full((3, 1, 2), 1e6), torch.full((3, 1, 2), -1e6))]
    anchors = unpack_anchors(pack_anchors(choose_anchors(layers, sink_scores(layers), 1.0)))
    assert bool(anchors.keys.isfinite().all())
    assert bool(anchors.values.isfinite().all())
