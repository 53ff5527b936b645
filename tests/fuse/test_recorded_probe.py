"""Recording the question: its scratch memory is its own, and a failure costs no answer.

What CUDA does is left out: here it is only told when recording begins. See tests/gpu for the rest.
"""

import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from weakref import ref

import pytest
import torch

from kvweave.fuse.recorded_probe import (
    MOST_FRONT,
    Found,
    ProbeKind,
    ProbeRecording,
    ProbeRecordings,
)
from kvweave.kernels import recording
from kvweave.kv.format.codec import LayerKV
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from worlds.tiny_models import make_model_folder


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = make_model_folder(tmp_path_factory.mktemp("models"), "llama")
    made: Decoder = load_decoder(folder, device="cpu", dtype="float32")
    return made


class Graph:
    def replay(self) -> None:
        """Nothing was recorded."""


@pytest.fixture
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is recorded runs once, and a replay answers the same again."""

    @contextmanager
    def record(graph: Graph, **_: str) -> Iterator[None]:
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", record)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)


def make_front(decoder: Decoder, num_tokens: int) -> tuple[LayerKV, ...]:
    spec = decoder.spec
    shape = (spec.num_layers, 2, num_tokens, spec.num_kv_heads, spec.head_dim)
    return tuple(LayerKV(k, v) for k, v in torch.randn(shape))


@pytest.mark.usefixtures("without_cuda")
@torch.inference_mode()
def test_the_lowest_layer_alone_is_asked_for_behind_a_preamble(decoder: Decoder) -> None:
    """As `weave` does in a model of one layer: nothing of the preamble is ever looked at."""
    recordings, front = ProbeRecordings(), make_front(decoder, 7)
    found = [recordings.probe(decoder, [5, 6, 7], 7, [0], front) for _ in range(2)][-1]
    assert found is not None
    assert len(found[0][0]) == 3


@pytest.mark.usefixtures("without_cuda")
@torch.inference_mode()
def test_a_recording_shows_the_preamble_it_is_given_and_keeps_none_alive(decoder: Decoder) -> None:
    """What the tree has of a prompt is copied for each request: it would be held for good."""
    made: list[ProbeRecording] = []

    def record(decoder: Decoder, kind: ProbeKind) -> ProbeRecording:
        made.append(ProbeRecording(decoder, kind))
        return made[-1]

    recordings, front = ProbeRecordings(record), make_front(decoder, 7)
    for _ in range(2):
        recordings.probe(decoder, [5, 6, 7], 7, [2], front)
    (recording,) = made
    assert torch.equal(recording.front[1, 0], front[1].k)
    recording.front.zero_()
    recordings.probe(decoder, [5, 6, 7], 7, [2], front)
    assert not recording.front.any(), "the same is not copied again"
    other = make_front(decoder, 7)
    recordings.probe(decoder, [5, 6, 7], 7, [2], other)
    assert torch.equal(recording.front[1, 1], other[1].v)
    gone = ref(other[0].k)
    del other
    assert gone() is None


@pytest.mark.usefixtures("without_cuda")
@torch.inference_mode()
def test_a_probe_that_was_ordered_ahead_is_played_once(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: list[Sequence[int]] = []
    play = ProbeRecording.play

    def counted(
        self: ProbeRecording, ids: Sequence[int], first: int, front: Sequence[LayerKV]
    ) -> Found:
        played.append(ids)
        return play(self, ids, first, front)

    monkeypatch.setattr(ProbeRecording, "play", counted)
    recordings, front = ProbeRecordings(), make_front(decoder, 7)
    recordings.begin(decoder, [5, 6, 7], 7, [2], front)
    assert not recordings.kept, "what is not recorded is not ordered ahead"
    for _ in range(2):
        recordings.probe(decoder, [5, 6, 7], 7, [2], front)
    assert played == [[5, 6, 7]]
    want = recordings.probe(decoder, [5, 6, 7], 7, [2], front)
    recordings.begin(decoder, [5, 6, 7], 7, [2], front)
    found = recordings.probe(decoder, [5, 6, 7], 7, [2], front)
    assert len(played) == 3, "the last one found it under way"
    assert want is not None
    assert found is not None
    assert torch.equal(found[2][0], want[2][0])
    recordings.probe(decoder, [5, 6, 7], 7, [2], front)
    assert len(played) == 4, "and took it"


@pytest.mark.usefixtures("without_cuda")
@torch.inference_mode()
def test_a_kind_that_was_asked_once_is_recorded_in_idle_time(decoder: Decoder) -> None:
    recordings = ProbeRecordings()
    assert not recordings.record_ahead(decoder)
    assert recordings.probe(decoder, [5, 6, 7], 0, [1]) is None
    assert recordings.record_ahead(decoder)
    assert not recordings.record_ahead(decoder), "all are recorded"
    assert recordings.probe(decoder, [5, 6, 7], 0, [1]) is not None


@pytest.mark.usefixtures("without_cuda")
@torch.inference_mode()
@pytest.mark.parametrize("differs", ["ids", "first", "front"])
def test_what_was_ordered_ahead_is_given_to_no_other_question(
    decoder: Decoder, differs: str
) -> None:
    recordings, front = ProbeRecordings(), make_front(decoder, 7)
    for _ in range(2):
        recordings.probe(decoder, [5, 6, 7], 7, [2], front)
    ids = [5, 6, 8] if differs == "ids" else [5, 6, 7]
    first = 9 if differs == "first" else 7
    other = make_front(decoder, 7) if differs == "front" else front
    recordings.begin(decoder, [5, 6, 7], 7, [2], front)
    ahead = recordings._under_way
    assert ahead is not None
    assert recordings.probe(decoder, ids, first, [2], other) is not ahead.found
    assert recordings._under_way is None


@pytest.mark.usefixtures("without_cuda")
@torch.inference_mode()
def test_what_was_ordered_behind_a_front_that_is_gone_is_given_to_none_without(
    decoder: Decoder,
) -> None:
    recordings, front = ProbeRecordings(), make_front(decoder, 7)
    for _ in range(2):
        recordings.probe(decoder, [5, 6, 7], 7, [2], front)
    recordings.begin(decoder, [5, 6, 7], 7, [2], front)
    ahead = recordings._under_way
    assert ahead is not None
    del front
    gc.collect()
    assert ahead.shown() is None, "its front is gone"
    assert not ahead.is_of([5, 6, 7], 7, [2], ())


def test_a_recording_takes_no_scratch_memory_that_goes_back_to_others(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that was there before would have another owner at the first replay."""
    before, inside = decoder._scratch, []
    # a GPU has none of them; here another test may have loaded them
    monkeypatch.setattr("kvweave.model.decoder.find_compiled", lambda *_: None)

    @contextmanager
    def record(graph: Graph, **_: str) -> Iterator[None]:
        inside.append(len(decoder._scratch))
        yield
        inside.append(len(decoder._scratch))

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", record)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    recordings = ProbeRecordings()
    with torch.inference_mode():
        assert recordings.probe(decoder, [5, 6, 7], 0, [1]) is None, "the first one warms up"
        found = recordings.probe(decoder, [5, 6, 7], 0, [1])
    assert found is not None
    assert len(found[1][0]) == 3
    assert inside[0] == 0
    assert inside[1] > 0
    assert decoder._scratch is before


def test_a_question_that_cannot_be_recorded_is_named_once_and_probed_all_the_same(
    decoder: Decoder, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    recordings = ProbeRecordings(fails)
    with caplog.at_level(logging.WARNING):
        assert [recordings.probe(decoder, [5, 6, 7], 0, [1]) for _ in range(4)] == [None] * 4
    assert caplog.text.count("cannot be recorded") == 1


def test_a_question_without_memory_is_recorded_later_and_other_lengths_at_once(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "PAUSE", 2)
    tried: list[int] = []

    class Short:
        def __init__(self, decoder: Decoder, kind: ProbeKind) -> None:
            tried.append(kind.num_rows)
            if tried == [16]:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

        def play(self, *_: object) -> dict[int, object]:
            return {}

    recordings = ProbeRecordings(Short)

    def plays(count: int) -> bool:
        return recordings.probe(decoder, [5] * count, 0, [1]) is not None

    assert [plays(3), plays(3)] == [False, False]
    assert [plays(20), plays(20)] == [False, True]
    assert [plays(3) for _ in range(3)] == [False, False, True]
    assert tried == [16, 32, 16]
    assert recordings.refusals.num_without_memory == 1


def test_a_front_with_chunks_in_it_takes_no_recordings_place(decoder: Decoder) -> None:
    spec = decoder.spec
    shape = (MOST_FRONT + 1, spec.num_kv_heads, spec.head_dim)
    long = [LayerKV(torch.zeros(shape), torch.zeros(shape))] * spec.num_layers
    short = [LayerKV(kv.k[1:], kv.v[1:]) for kv in long]
    recordings = ProbeRecordings()
    assert recordings.probe(decoder, [5], 0, [1], long) is None
    assert not recordings.kept
    assert recordings.probe(decoder, [5], 0, [1], short) is None
    assert len(recordings.kept) == 1
