"""Steps between attentions: recorded over buffers of their own, they compute what plain ones do.

What CUDA does is left out: here a recording is the work itself. See tests/gpu for the rest.
"""

import gc
import logging
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvweave.fuse import probe
from kvweave.fuse import recordings as recordings_module
from kvweave.fuse.recorded_layers import (
    MOST_ROWS,
    GraphRecorder,
    LayerRecordings,
    Play,
    RecordedSteps,
    StepBuffers,
    compute_step,
    padded_rows,
)
from kvweave.fuse.recordings import PlainSteps, Recordings, recordings_of, steps_of
from kvweave.kernels import recording
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from worlds.fuse import World, assert_same, make_ids
from worlds.tiny_models import make_model_folder


@pytest.fixture(scope="module", params=["llama-biases", "qwen3"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = make_model_folder(tmp_path_factory.mktemp("models"), request.param)
    made: Decoder = load_decoder(folder, device="cpu", dtype="float32")
    return made


class Again:
    """Plays by doing the work again, as a graph does, and counts."""

    recorded, played = 0, 0

    def __init__(self, decoder: Decoder, buffers: StepBuffers) -> None:
        assert len(buffers.hidden) == MOST_ROWS
        compute_step(decoder, buffers, 1)

    def record(self, decoder: Decoder, work: Play) -> Play:
        type(self).recorded += 1

        def play() -> None:
            type(self).played += 1
            work()

        return play


@pytest.fixture
def recorder() -> type[Again]:
    return type("Counted", (Again,), {"recorded": 0, "played": 0})


def climb(steps: object, num_layers: int, attended: list[Tensor]) -> list[Tensor]:
    """All projections on the way up, with the same attention outputs for all."""
    found = [torch.cat([x.flatten(1) for x in _qkv(steps.first())], 1)]
    for layer in range(num_layers - 1):
        o = attended[layer]
        if steps.attention_out is not None and layer % 2:  # attention may write there, or not
            o = steps.attention_out.copy_(o)
        found.append(torch.cat([x.flatten(1) for x in _qkv(steps.next(layer, o))], 1))
    return [*found, steps.hidden.clone()]


def _qkv(fresh: object) -> tuple[Tensor, Tensor, Tensor]:
    return fresh.q, fresh.k, fresh.v


def rows(decoder: Decoder, count: int, seed: int) -> tuple[Tensor, list[Tensor]]:
    g = torch.Generator().manual_seed(seed)
    spec = decoder.spec
    h = torch.randn(count, spec.hidden_dim, generator=g)
    shape = (count, spec.num_heads, spec.head_dim)
    return h, [torch.randn(shape, generator=g) for _ in range(spec.num_layers)]


@torch.inference_mode()
def test_recorded_steps_are_plain_ones_whatever_stood_in_the_buffers(
    decoder: Decoder, recorder: type[Again]
) -> None:
    recordings, layers = LayerRecordings(recorder), decoder.spec.num_layers
    for nth, count in enumerate([40, 5, 37, 16, 5, 33, 1, 40, 130]):
        h, attended = rows(decoder, count, nth)
        steps = recordings.begin(decoder, h)
        assert steps is not None
        got = climb(steps, layers, attended)
        want = climb(PlainSteps(decoder, h.clone()), layers, attended)
        for mine, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    assert recorder.recorded == 2 * layers, "of 48 and 16 rows, which came twice"
    assert recorder.played == 6 * layers, "all but the first of either"


@torch.inference_mode()
def test_rows_that_fill_up_change_nothing_even_if_they_are_no_numbers(
    decoder: Decoder, recorder: type[Again]
) -> None:
    recordings = LayerRecordings(recorder)
    h, attended = rows(decoder, 19, 1)
    want = climb(PlainSteps(decoder, h.clone()), decoder.spec.num_layers, attended)
    for _ in range(3):
        steps = recordings.begin(decoder, h)
        assert steps is not None
        for x in recordings.buffers or ():
            x[19:] = torch.nan
        got = climb(steps, decoder.spec.num_layers, attended)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_rows_that_fill_up_do_not_grow_from_pass_to_pass(
    decoder: Decoder, recorder: type[Again]
) -> None:
    recordings, largest = LayerRecordings(recorder), []
    for _ in range(6):
        h, attended = rows(decoder, 3, 0)
        steps = recordings.begin(decoder, h)
        assert steps is not None
        climb(steps, decoder.spec.num_layers, attended)
        assert recordings.buffers is not None
        largest.append(float(recordings.buffers.hidden[3:16].abs().max()))
    assert largest[-1] == largest[2]


def test_rows_are_filled_up_to_a_multiple_of_16_or_64() -> None:
    assert [padded_rows(n) for n in (1, 16, 17, 128, 129, 1290)] == [16, 16, 32, 128, 192, 1344]
    assert padded_rows(MOST_ROWS) == MOST_ROWS
    assert padded_rows(MOST_ROWS + 1) is None
    assert padded_rows(0) is None


def test_all_numbers_of_rows_are_kept(decoder: Decoder, recorder: type[Again]) -> None:
    recordings = LayerRecordings(recorder)
    for count in range(1, MOST_ROWS + 1, 16):
        assert recordings.begin(decoder, torch.zeros(count, decoder.spec.hidden_dim)) is not None
    assert len(recordings.kept) == 38


@torch.inference_mode()
def test_what_was_computed_once_is_recorded_in_idle_time(
    decoder: Decoder, recorder: type[Again]
) -> None:
    recordings, num_layers = LayerRecordings(recorder), decoder.spec.num_layers
    attended = [torch.randn(5, decoder.spec.num_heads, decoder.spec.head_dim) for _ in range(9)]
    assert not recordings.record_ahead(decoder), "nothing was asked for"
    h = torch.randn(5, decoder.spec.hidden_dim)
    want = climb(begun(recordings, decoder, h), num_layers, attended)
    assert recordings.kept == {16: 0}, "the first one computes plainly"
    while recordings.record_ahead(decoder):
        pass
    assert recordings.kept == {16: num_layers}
    found = climb(begun(recordings, decoder, h), num_layers, attended)
    assert recorder.recorded == recorder.played == num_layers
    for mine, theirs in zip(found, want, strict=True):
        torch.testing.assert_close(mine, theirs)


@torch.inference_mode()
def test_other_numbers_of_rows_are_recorded_before_they_come(
    decoder: Decoder, recorder: type[Again]
) -> None:
    """A new number of rows would pay for its recordings inside a request otherwise."""
    recordings, num_layers = LayerRecordings(recorder), decoder.spec.num_layers
    assert not recordings.record_near(decoder), "nothing was asked for"
    begun(recordings, decoder, torch.zeros(300, decoder.spec.hidden_dim))
    while recordings.record_ahead(decoder):
        pass
    while recordings.record_near(decoder) and recorder.recorded < num_layers + 1:
        pass
    assert not recordings.record_ahead(decoder), "what may come gives way to jobs"
    while recordings.record_ahead(decoder) or recordings.record_near(decoder):
        pass
    assert recordings.kept == dict.fromkeys((192, 256, 320, 384, 448), num_layers)
    assert next(reversed(recordings.kept)) == 320, "the one that was computed"
    before = recorder.recorded
    attended = [torch.randn(240, decoder.spec.num_heads, decoder.spec.head_dim) for _ in range(9)]
    climb(
        begun(recordings, decoder, torch.zeros(240, decoder.spec.hidden_dim)), num_layers, attended
    )
    assert recorder.recorded == before
    assert recorder.played == num_layers


def begun(recordings: LayerRecordings, decoder: Decoder, h: Tensor) -> RecordedSteps:
    steps = recordings.begin(decoder, h.clone())
    assert steps is not None
    return steps


def test_what_cannot_be_recorded_is_not_tried_again_in_idle_time(decoder: Decoder) -> None:
    def fails(*_: object) -> Again:
        raise RuntimeError("operation not permitted when stream is capturing")

    recordings = LayerRecordings(fails)
    begun(recordings, decoder, torch.zeros(5, decoder.spec.hidden_dim))
    assert not recordings.record_ahead(decoder)
    assert recordings.refusals.num_tried == 1
    assert not recordings.record_ahead(decoder)
    assert recordings.refusals.num_tried == 1


def test_steps_that_lost_their_buffers_to_another_pass_say_so(
    decoder: Decoder, recorder: type[Again]
) -> None:
    recordings = LayerRecordings(recorder)
    h, _ = rows(decoder, 3, 0)
    first = recordings.begin(decoder, h)
    recordings.begin(decoder, h)
    assert first is not None
    with pytest.raises(AssertionError, match="another pass"):
        first.first()


@pytest.mark.parametrize("when", ["opening", "recording"])
@torch.inference_mode()
def test_layers_that_cannot_be_recorded_are_named_once_and_computed_all_the_same(
    decoder: Decoder, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    class Refuses(Again):
        def __init__(self, decoder: Decoder, buffers: StepBuffers) -> None:
            if when == "opening":
                raise RuntimeError("operation not permitted when stream is capturing")

        def record(self, decoder: Decoder, work: Play) -> Play:
            raise RuntimeError("operation not permitted when stream is capturing")

    recordings = LayerRecordings(Refuses)
    h, attended = rows(decoder, 20, 3)
    want = climb(PlainSteps(decoder, h.clone()), decoder.spec.num_layers, attended)
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            steps = recordings.begin(decoder, h)
            assert steps is not None
            got = climb(steps, decoder.spec.num_layers, attended)
            for mine, theirs in zip(got, want, strict=True):
                torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    assert caplog.text.count("cannot be recorded") == 1


@pytest.mark.parametrize("when", ["opening", "recording"])
@torch.inference_mode()
def test_layers_without_memory_are_recorded_when_there_is_some(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, recorder: type[Again], when: str
) -> None:
    monkeypatch.setattr(recording, "PAUSE", decoder.spec.num_layers if when == "recording" else 1)
    short = [when]

    class Short(recorder):  # type: ignore[misc, valid-type]
        def __init__(self, decoder: Decoder, buffers: StepBuffers) -> None:
            super().__init__(decoder, buffers)
            if "opening" in short:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

        def record(self, decoder: Decoder, work: Play) -> Play:
            if "recording" in short:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
            return super().record(decoder, work)

    recordings, layers = LayerRecordings(Short), decoder.spec.num_layers

    def one_pass(count: int) -> None:
        h, attended = rows(decoder, count, 3)
        steps = recordings.begin(decoder, h)
        assert steps is not None
        got = climb(steps, layers, attended)
        want = climb(PlainSteps(decoder, h.clone()), layers, attended)
        for mine, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)

    for _ in range(2):
        one_pass(20)
    assert recordings.refusals.num_without_memory == 1
    assert Short.recorded == 0
    short.clear()
    if when == "recording":  # another size is not to blame
        one_pass(40)
        one_pass(40)
        assert Short.recorded == layers
    for _ in range(4):
        one_pass(20)
    assert Short.recorded == layers * (2 if when == "recording" else 1)
    assert Short.played > 0
    assert recordings.refusals.num_failed == 0


def test_a_decoder_without_a_gpu_takes_plain_steps(decoder: Decoder) -> None:
    assert isinstance(steps_of(decoder, torch.zeros(3, decoder.spec.hidden_dim)), PlainSteps)


@pytest.fixture
def as_on_a_gpu(
    decoder: Decoder, recorder: type[Again], monkeypatch: pytest.MonkeyPatch
) -> Callable[[], LayerRecordings]:
    """Let this decoder take recorded steps from here on."""

    def switch() -> LayerRecordings:
        recordings = LayerRecordings(recorder)
        both = Recordings(recordings, _NoQuestions())  # the recorded question is another matter
        monkeypatch.setattr(recordings_module, "recordings_of", lambda _: both)
        monkeypatch.setattr(probe, "recordings_of", lambda _: both)
        monkeypatch.setattr(type(decoder), "can_record", property(lambda _: True))
        return recordings

    return switch


class _NoQuestions:
    def probe(self, *_: object) -> None:
        return None


@pytest.mark.parametrize(
    "name",
    ["reuse", "fusionrag", "weave", "prophetkv", "qcfuse", "cacheblend-gradual", "kvshare-like"],
)
def test_a_prompt_fused_over_recorded_layers_is_the_one_fused_plainly(
    decoder: Decoder,
    recorder: type[Again],
    as_on_a_gpu: Callable[[], LayerRecordings],
    name: str,
) -> None:
    worlds = [World(decoder, chunks=make_ids(seed, 30, 1, 40, 25), missing={2}) for seed in (1, 2)]
    ratios = (0.2, 0.5, 0.2)
    plain = [[world.fuse(name, ratio) for ratio in ratios] for world in worlds]
    as_on_a_gpu()
    for world, wanted in zip(worlds, plain, strict=True):
        for ratio, (want, want_kv) in zip(ratios, wanted, strict=True):
            got, got_kv = world.fuse(name, ratio)
            assert got.recomputed == want.recomputed
            assert got.rows_per_layer == want.rows_per_layer
            assert_same(got_kv, want_kv)
    assert recorder.played > 0


def test_recordings_go_with_their_decoder(tmp_path: object) -> None:
    folder = make_model_folder(tmp_path, "llama")
    decoder = load_decoder(folder, device="cpu", dtype="float32")
    recordings = recordings_of(decoder).layers
    assert isinstance(recordings.begin(decoder, torch.zeros(3, 32)), RecordedSteps)
    assert recordings.new_recorder is GraphRecorder
    gone = weakref.ref(recordings)
    del recordings, decoder
    gc.collect()
    assert gone() is None
