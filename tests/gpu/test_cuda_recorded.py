"""Layers recorded as CUDA graphs: what they compute, what they hold, what they leave alone.

Needs bare PyTorch, transformers and a CUDA device: `pytest -m gpu tests/gpu`. With `-s` it prints
how many orders and how much memory there were.
"""

import gc
import logging
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from kvweave.fuse import probe
from kvweave.fuse import recordings as recordings_module
from kvweave.fuse.recorded_layers import MOST_ROWS, LayerRecordings
from kvweave.fuse.recordings import PlainSteps, Recordings, recordings_of
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from worlds.fuse import World, assert_same, make_ids
from worlds.tiny_models import make_model_folder

pytestmark = pytest.mark.gpu

CHUNKS = make_ids(2, 40, 1, 130, 25, 64)
WAYS = ["reuse", "fusionrag", "weave", "prophetkv", "qcfuse", "cacheblend", "kvshare-like"]
VARIANTS = ["llama", "llama-biases", "qwen3"]
# wide enough for the attention kernel of Hopper, which a tiny head is not
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


@pytest.fixture(scope="module", autouse=True)
def exact_products() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture(autouse=True)
def nothing_is_refused(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A recording that failed says why here; results alone would not show it."""
    with caplog.at_level(logging.WARNING, logger="kvweave.fuse"):
        yield
    assert "cannot be recorded" not in caplog.text, caplog.text


@pytest.fixture(scope="module", params=VARIANTS)
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = make_model_folder(tmp_path_factory.mktemp("models"), request.param)
    made: Decoder = load_decoder(folder, device="cuda", dtype="float32")
    return made


@pytest.fixture
def plainly(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], object]:
    """Do something without any recording."""

    def do(what: Callable[[], object]) -> object:
        with monkeypatch.context() as patch:
            never = Recordings(_Never(), _Never())
            patch.setattr(recordings_module, "recordings_of", lambda _: never)
            patch.setattr(probe, "recordings_of", lambda _: never)
            return what()

    return do


class _Never:
    def begin(self, *_: object) -> None:
        return None

    def probe(self, *_: object) -> None:
        return None


def climb(steps: object, attended: list[Tensor]) -> list[Tensor]:
    fresh = steps.first()
    found = [torch.cat([fresh.q, fresh.k, fresh.v], 1).clone()]
    for layer, o in enumerate(attended):
        if steps.attention_out is not None and layer % 2:
            o = steps.attention_out.copy_(o)
        fresh = steps.next(layer, o)
        found.append(torch.cat([fresh.q, fresh.k, fresh.v], 1).clone())
    return [*found, steps.hidden.clone()]


def random_rows(decoder: Decoder, count: int) -> tuple[Tensor, list[Tensor]]:
    spec, like = decoder.spec, {"device": decoder.device, "dtype": decoder.dtype}
    h = torch.randn(count, spec.hidden_dim, **like)
    shape = (count, spec.num_heads, spec.head_dim)
    return h, [torch.randn(shape, **like) for _ in range(spec.num_layers - 1)]


@torch.inference_mode()
def test_recorded_steps_are_plain_ones_whatever_stood_in_the_buffers(decoder: Decoder) -> None:
    recordings = LayerRecordings()
    counts = [40, 5, 37, 16, 5, 33, 1, 129, 40, 130, 700, 64, 690, MOST_ROWS, MOST_ROWS - 1]
    for nth, count in enumerate([*counts, *counts]):
        h, attended = random_rows(decoder, count)
        steps = recordings.begin(decoder, h)
        assert steps is not None
        if nth % 3 == 0:
            for x in recordings.buffers or ():
                x[count:] = torch.nan
        got = climb(steps, attended)
        for mine, theirs in zip(got, climb(PlainSteps(decoder, h), attended), strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
    recorded = recordings.kept
    print(f"\nrecorded steps by rows: {recorded}")
    assert set(recorded.values()) == {decoder.spec.num_layers}


@pytest.mark.parametrize("name", WAYS)
def test_a_prompt_fused_over_recorded_layers_is_the_one_fused_plainly(
    decoder: Decoder, plainly: Callable, name: str
) -> None:
    """Prompts in turn, so that every pass finds the rows of another one in the buffers."""
    worlds = [
        World(decoder, chunks=CHUNKS, missing={3}),
        World(decoder, chunks=make_ids(9, 17, 64, 33), question=make_ids(8, 23)[0]),
    ]
    for ratio in (0.2, 0.37, 0.2, 0.37, 0.2):
        for world in worlds:
            want, want_kv = plainly(lambda w=world, r=ratio: w.fuse(name, r))
            got, got_kv = world.fuse(name, ratio)
            assert got.recomputed == want.recomputed
            assert got.rows_per_layer == want.rows_per_layer
            assert_same(got_kv, want_kv)
    plays = recordings_of(decoder).layers.kept
    print(f"\n{name}: recorded steps by rows {plays}")
    assert any(count == decoder.spec.num_layers for count in plays.values())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["reuse", "fusionrag", "weave", "qcfuse"])
def test_heads_of_64_in_half_precision_go_the_same_way(
    tmp_path: object, plainly: Callable, name: str, dtype: str
) -> None:
    """Attention writes into the recordings' buffer through the kernels of large models."""
    decoder = load_decoder(make_model_folder(tmp_path, "llama", **WIDE), device="cuda", dtype=dtype)
    for layer in decoder.weights.layers:  # as drawn, every row looks at one key alone
        layer.qkv.weight.mul_(0.2)
    world = World(decoder, chunks=make_ids(5, 200, 64, 333), question=make_ids(8, 40)[0])
    for _ in range(3):
        got, got_kv = world.fuse(name, 0.2)
    want, want_kv = plainly(lambda: world.fuse(name, 0.2))
    shared = set(got.recomputed) & set(want.recomputed)
    print(f"\n{name} {dtype}: {len(shared)} of {len(want.recomputed)} rows are the same")
    assert len(shared) >= 0.9 * len(want.recomputed), "products of other sizes round otherwise"
    if got.recomputed == want.recomputed:
        scale = float(want_kv.logits.abs().max())
        off = float((got_kv.logits - want_kv.logits).abs().max())
        print(f"logits differ by {off:.4f} of {scale:.2f}")
        assert off < 0.05 * scale


def test_two_decoders_do_not_hear_of_each_other(
    tmp_path_factory: pytest.TempPathFactory, plainly: Callable
) -> None:
    worlds = []
    for seed in (1, 2):
        folder = make_model_folder(tmp_path_factory.mktemp("models"), "llama", seed)
        worlds.append(World(load_decoder(folder, device="cuda", dtype="float32"), chunks=CHUNKS))
    wanted = [plainly(lambda w=world: w.fuse("weave", 0.2)) for world in worlds]
    for _ in range(4):
        for world, (want, want_kv) in zip(worlds, wanted, strict=True):
            got, got_kv = world.fuse("weave", 0.2)
            assert got.recomputed == want.recomputed
            assert_same(got_kv, want_kv)


@torch.inference_mode()
def test_recordings_of_many_sizes_hold_no_more_memory_than_the_largest(tmp_path: object) -> None:
    """Whatever the order, the smallest first being the worst; and all of it goes with them."""
    decoder = load_decoder(
        make_model_folder(tmp_path, "llama", hidden_size=1024, intermediate_size=4096),
        device="cuda",
        dtype="bfloat16",
    )
    widest, attended = random_rows(decoder, MOST_ROWS)
    climb(PlainSteps(decoder, widest), attended)  # the decoder's own scratch memory
    del widest, attended
    recordings = LayerRecordings()
    held = []
    started_s = time.perf_counter()
    for count in (100, *range(192, MOST_ROWS + 1, 64)):
        for _ in range(2):
            h, attended = random_rows(decoder, count)
            steps = recordings.begin(decoder, h)
            assert steps is not None
            climb(steps, attended)
        del h, attended, steps
        torch.cuda.empty_cache()
        held.append(torch.cuda.memory_reserved())
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started_s
    print(f"\nreserved MB after each size: {[round(x / 2**20) for x in held]}")
    print(f"{len(held)} sizes in {seconds:.2f} s; kept {len(recordings.kept)}")
    assert len(recordings.kept) == len(held)
    assert held[-1] - held[0] < 32 << 20
    free = torch.cuda.mem_get_info()[0]
    del recordings
    gc.collect()
    torch.cuda.empty_cache()
    after = torch.cuda.memory_reserved()
    print(f"reserved MB without recordings: {after / 2**20:.0f}; ", end="")
    print(f"{(torch.cuda.mem_get_info()[0] - free) / 2**20:.0f} MB of the device came back")
    assert after < held[0]


@torch.inference_mode()
def test_a_played_step_is_one_order(decoder: Decoder) -> None:
    from torch.profiler import ProfilerActivity, profile

    recordings = LayerRecordings()
    h, attended = random_rows(decoder, 37)

    def orders(steps: object) -> dict[str, int]:
        torch.cuda.synchronize()
        both = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        with profile(activities=both, acc_events=True) as seen:
            steps.next(0, attended[0])
            torch.cuda.synchronize()
        names = [event.name for event in seen.events()]
        return {name: names.count(name) for name in names if "Launch" in name}

    for _ in range(3):
        steps = recordings.begin(decoder, h)
        assert steps is not None
        steps.first()
        recorded = orders(steps)
    plain = PlainSteps(decoder, h.clone())
    plain.first()
    print(f"\nplain {orders(plain)}, recorded {recorded}")
    assert recorded.get("cudaGraphLaunch") == 1
    assert sum(recorded.values()) <= 3, "and the copy of what attention did not write there"


def test_recordings_are_kept_per_decoder(decoder: Decoder) -> None:
    assert recordings_of(decoder) is recordings_of(decoder)
