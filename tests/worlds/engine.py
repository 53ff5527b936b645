"""A small world for tests of the engine: a tiny model in float64, requests, and the oracle."""

import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from kvweave.engine.config import EngineConfig
from kvweave.engine.request import EngineChunk, EngineRequest, Ticket
from kvweave.engine.sampling import Choice, Sampling
from kvweave.model.decoder import Decoder
from kvweave.model.files.tensor_files import TensorFiles
from kvweave.model.spec import read_spec
from kvweave.model.weights import load_weights
from kvweave.types import ChunkId
from worlds.plain_loop import generate

VOCABULARY = 97
SMALL = EngineConfig(
    page_tokens=4, pool_tokens=4 * 256, max_running=6, step_rows=8, alone_rows=32,
    share_chunks=False, copy_tokens=0,
)  # fmt: skip


def make_decoder(folder: Path) -> Decoder:
    """In float64 no two logits are so close that another order of adding could swap them."""
    spec = read_spec(folder)
    weights = load_weights(TensorFiles(folder), spec, torch.float64, torch.device("cpu"))
    return Decoder(spec, weights)


def ids(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCABULARY) for _ in range(count))


def plain(question: Sequence[int], **how: object) -> EngineRequest:
    """A prompt without parts."""
    sampling = Sampling(**how)  # type: ignore[arg-type]
    return EngineRequest(tuple(question), sampling, frozenset())


def with_chunks(
    preamble: Sequence[int],
    chunks: Sequence[Sequence[int]],
    question: Sequence[int],
    *,
    use_tree: bool = True,
    max_tokens: int = 8,
) -> EngineRequest:
    named = tuple(EngineChunk(ChunkId(repr(list(c))), tuple(c)) for c in chunks)
    sampling = Sampling(max_tokens=max_tokens)
    return EngineRequest(
        tuple(question), sampling, frozenset(), tuple(preamble), named, use_tree=use_tree
    )


def alone(decoder: Decoder, request: EngineRequest) -> list[Choice]:
    """What the plain loop answers, on a decoder of its own: the engine may be using the other."""
    decoder = Decoder(decoder.spec, decoder.weights)
    return list(generate(decoder, request.prompt_ids, request.sampling, request.eos_ids))


def tokens(ticket: Ticket) -> list[int]:
    return [choice.token_id for choice in ticket]


def until(condition: Callable[[], bool]) -> None:
    """Wait for the engine thread."""
    for _ in range(10_000):
        if condition():
            return
        threading.Event().wait(0.001)
    raise AssertionError("it never happened")
