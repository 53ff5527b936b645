"""Questions do not wait for documents, and documents give way to answers."""

import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest

from kvweave.app.libraries import embedders
from kvweave.app.libraries.embedders import BUSY_SHARE, SharedEmbedder
from kvweave.corpus.embedder import Vectors


class SlowEmbedder:
    """Takes so long for a text; its vector is the text's length."""

    name = identity = "slow"
    dim = 1

    def __init__(self, text_s: float) -> None:
        self._text_s = text_s
        self.calls: list[Sequence[str]] = []
        self._running = threading.Lock()

    def embed_passages(self, texts: Sequence[str]) -> Vectors:
        assert self._running.acquire(blocking=False), "two calls at once"
        try:
            self.calls.append(texts)
            time.sleep(self._text_s * len(texts))
            return np.array([[len(text)] for text in texts], np.float32).reshape(-1, 1)
        finally:
            self._running.release()

    def embed_query(self, text: str) -> Vectors:
        vector: Vectors = self.embed_passages([text])[0]
        return vector

    def num_tokens(self, text: str) -> int:
        return len(text.split())


TEXTS = ["x" * length for length in range(1, 41)]


def test_vectors_are_those_of_the_texts_in_slices_of_any_size() -> None:
    slow = SlowEmbedder(0.0005)
    shared = SharedEmbedder(slow)
    assert shared.embed_passages(TEXTS)[:, 0].tolist() == [len(text) for text in TEXTS]
    assert [text for call in slow.calls for text in call] == TEXTS
    assert shared.embed_passages([]).shape == (0, 1)
    embedded = shared.embed(["a b", "c"], as_query=False)
    assert (embedded.vectors[:, 0].tolist(), embedded.num_tokens) == ([3, 1], 3)


def test_a_question_waits_for_a_slice_and_not_for_all_documents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(embedders, "SLICE_S", 0.02)
    slow = SlowEmbedder(0.02)
    shared = SharedEmbedder(slow)
    ingest = threading.Thread(target=shared.embed_passages, args=(TEXTS,))
    ingest.start()
    while not slow.calls:
        time.sleep(0.001)
    for number in range(3):  # one after another, and each comes next
        before = len(slow.calls)
        shared.embed_query(f"? {number}")
        asked = [call for call in slow.calls[before:] if call[0].startswith("?")]
        assert len(asked) == 1
        assert slow.calls.index(asked[0]) <= before + 1, "at most one slice went before it"
    assert ingest.is_alive(), "documents were still coming in"
    ingest.join()
    assert [text for call in slow.calls for text in call if text in TEXTS] == TEXTS


def test_documents_give_way_to_answers_and_what_somebody_waits_for_does_not() -> None:
    slow, rests = SlowEmbedder(0.01), list[float]()

    def never_quiet(timeout_s: float) -> bool:
        if timeout_s:
            rests.append(timeout_s)
        return False

    shared = SharedEmbedder(slow, never_quiet)
    shared.embed_passages(TEXTS[:20])
    sizes = [len(call) for call in slow.calls]
    assert max(sizes[1:]) <= embedders.SLICE_S / 0.01, "slices are short"
    spent_s = 0.01 * sum(sizes)
    assert sum(rests) >= spent_s * (1 / BUSY_SHARE - 1) * 0.99
    rests.clear()
    shared.embed(TEXTS[:8], as_query=False)
    assert not rests


def test_a_call_that_fails_leaves_the_turn_to_the_next() -> None:
    shared = SharedEmbedder(SlowEmbedder(0.0))
    with pytest.raises(TypeError):
        shared.embed_passages([None])  # type: ignore[list-item]
    assert shared.embed_query("abc").tolist() == [3]
