"""What faults of a device are put into: a model of random weights, its chunk KV, and right answers.

There is no server here: a machine with a GPU and bare PyTorch has none of its packages. Requests go
to the engine itself, watched by the server's own `EngineWatch`. What is compared is what the model
thinks of each token of an answer, so weights need not mean anything.
"""

import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvweave.engine.config import EngineConfig
from kvweave.engine.engine import Engine
from kvweave.engine.request import EngineChunk, EngineRequest, FusedPart, Ticket
from kvweave.engine.sampling import Sampling
from kvweave.fuse.encode.chunk_pass import encode_chunks, encode_prefix
from kvweave.fuse.request import PromptChunk
from kvweave.fuse.selectors.query_attention import QueryAttention
from kvweave.fuse.selectors.strategies import open_strategy
from kvweave.fuse.strategy import ModelFacts, Strategy
from kvweave.kv.format.keys import ChunkKey, KeyContext, make_chunk_key
from kvweave.kv.format.objects import PackedChunk, pack_chunk
from kvweave.kv.store import KVStore
from kvweave.kv.tiers.config import DiskTierConfig, HostTierConfig, StoreConfig
from kvweave.model.decoder import Decoder
from kvweave.model.rope import RopeSpec
from kvweave.model.shapes import SHAPES, random_decoder
from kvweave.model.spec import ModelSpec
from kvweave.types import ChunkId

# Small, and deep enough that layers travel in groups; as wide as a Triton kernel wants them.
SHAPE = ModelSpec(
    family="llama", num_layers=12, hidden_dim=1024, inner_dim=2816, num_heads=8, num_kv_heads=4,
    head_dim=128, vocab_size=8192, max_context=16384, norm_eps=1e-5,
    rope=RopeSpec("default", 10_000.0, 128),
)  # fmt: skip
CHUNKS, K = 6, 2  # chunks in all, and of a prompt: the first is exact where it is loaded
ANSWER = 4  # tokens
# Distance of two answers, 0 the same and about 1.4 two that have nothing to do with each other.
# Rows of a bfloat16 model that are computed in another batch differ by some hundredths.
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 0.12}
PATIENCE_S = 60.0  # for an answer; later it is stuck

FULL, FUSED = "full", "fused"  # how a prompt is asked
WEAVE, REUSE = 0.3, 0.0  # shares of rows that are computed anew


class Answer(NamedTuple):
    """What came of a request."""

    tokens: tuple[int, ...]
    thoughts: tuple[Tensor, ...]  # [V] log probabilities, one for each token
    error: BaseException | None
    seconds: float
    whys: tuple[str, ...] = ()
    is_stuck: bool = False

    @property
    def is_whole(self) -> bool:
        return self.error is None and not self.is_stuck and len(self.tokens) == ANSWER


class Question(NamedTuple):
    """A prompt, and how it is asked."""

    places: tuple[int, ...]  # its chunks
    number: int  # of the question behind them
    how: str = FUSED
    ratio: float = REUSE


@dataclass
class DeviceWorld:
    """A decoder on a device, its chunk KV in host memory and on a disk, requests over them."""

    device: torch.device
    folder: Path
    truths: dict[Question, list[Answer]] = field(default_factory=dict)  # any of them is right

    def __post_init__(self) -> None:
        on_gpu = self.device.type == "cuda"
        spec = self.spec = SHAPE if on_gpu else SHAPES["tiny"]
        dtype = torch.bfloat16 if on_gpu else torch.float32
        self.page, length = (64, 210) if on_gpu else (8, 21)  # chunks end inside pages
        self.decoder = random_decoder(spec, self.device, dtype)
        self.tolerance = TOLERANCE[dtype]
        rng = random.Random(5)

        def ids(count: int) -> tuple[int, ...]:
            return tuple(rng.randrange(10, spec.vocab_size) for _ in range(count))

        self.preamble = encode_prefix(self.decoder, ids(self.page // 2 + 3))
        self.chunks = [ids(length + n) for n in range(CHUNKS)]
        self.questions = [ids(9 + n) for n in range(4)]
        self.prompt_tokens = self.page // 2 + 3 + K * (length + CHUNKS) + 12
        context = KeyContext("bench", str(dtype), "raw", "any", (), "any")
        self.keys = [make_chunk_key(context, chunk) for chunk in self.chunks]
        self.weave = _weave(spec.num_layers)
        self.reuse = open_strategy("reuse", ModelFacts(spec.num_layers))
        made = encode_chunks(self.decoder, self.preamble, self.chunks)
        self._packed = [
            pack_chunk(key, layers, "raw") for key, layers in zip(self.keys, made, strict=True)
        ]
        self.store = self._filled(StoreConfig((HostTierConfig(1 << 30),)))
        # no chunk fits into this host memory: every request reads the files
        tiers = (HostTierConfig(1 << 10), DiskTierConfig(self.folder / "kv", fsync=False))
        self.on_disk = self._filled(StoreConfig(tiers))
        assert self.on_disk.flush()

    def _filled(self, cfg: StoreConfig) -> KVStore:
        store = KVStore(cfg)
        for packed in self._packed:
            store.save(packed)
        return store

    def renew_decoder(self) -> None:
        """The same weights, and nothing else that the one before has."""
        self.decoder = Decoder(self.spec, self.decoder.weights)

    def packed(self, key: ChunkKey) -> PackedChunk:
        return self._packed[self.keys.index(key)]

    def facts(self) -> dict[str, Any]:
        """What the rows ran on."""
        spec = self.spec
        return {
            "weights": "random", "dtype": str(self.decoder.dtype), "layers": spec.num_layers,
            "kv_heads": spec.num_kv_heads, "head_dim": spec.head_dim, "page_tokens": self.page,
            "prompt_tokens": self.prompt_tokens, "asked": "the engine itself, no server",
        }  # fmt: skip

    def save_again(self, store: KVStore) -> None:
        """What was damaged is stored anew."""
        for packed in self._packed:
            store.save(packed)
        assert store.flush()

    def config(self, *, shares: bool, **more: Any) -> EngineConfig:
        """A pool for some prompts, so that they push each other out."""
        usual: dict[str, Any] = {
            "page_tokens": self.page,
            "pool_tokens": 12 * self.prompt_tokens,
            "host_tokens": 60 * self.prompt_tokens,
            "max_running": 16,
        }
        return EngineConfig(share_chunks=shares, **{**usual, **more})

    def request(
        self,
        question: Question,
        tenant: str = "",
        *,
        store: KVStore | None = None,
        answer: int = ANSWER,
        close_call: float = 0.0,
    ) -> EngineRequest:
        """A tenant that asks for the first time finds nothing of its own on the device."""
        fused = None
        if question.how == FUSED:
            chunks = tuple(
                PromptChunk(self.chunks[p], self.keys[p], self.keys[p]) for p in question.places
            )
            strategy = self.weave if question.ratio else self.reuse
            fused = FusedPart(
                store or self.store, self.preamble, chunks, strategy, question.ratio,
                close_call=close_call,
            )  # fmt: skip
        return EngineRequest(
            self.questions[question.number],
            Sampling(max_tokens=answer),
            frozenset(),
            self.preamble.token_ids,
            tuple(EngineChunk(ChunkId(f"{p:032x}"), self.chunks[p]) for p in question.places),
            use_tree=True,
            fused=fused,
            namespace=tenant,
            watched=min(answer, ANSWER),
        )

    def learn(self, engine: Engine, questions: Iterable[Question]) -> None:
        """The answers of an undisturbed engine: over what it has to bring, and over what it has."""
        for question in questions:
            full = self.ask(engine, question._replace(how=FULL, ratio=REUSE), "in full")
            tenant = f"{question}"  # else exact KV of others would be found
            found = [self.ask(engine, question, tenant) for _ in range(3)]
            for each in (full, *found):
                if not each.is_whole:
                    raise RuntimeError(f"an undisturbed engine: {each.error!r}") from each.error
            self.truths[question] = [full, *found]

    def judge(self, question: Question, answer: Answer) -> str:
        """full, fused, error or wrong; stuck if it never came."""
        if answer.is_stuck:
            return "stuck"
        if answer.error is not None:
            return "error"
        truths = self.truths[question]
        near = min(range(len(truths)), key=lambda n: distance(answer, truths[n]))
        if distance(answer, truths[near]) > self.tolerance:
            return "wrong"
        return FULL if near == 0 or question.how == FULL else FUSED

    def ask(
        self, engine: Engine, question: Question, tenant: str = "", *, store: KVStore | None = None
    ) -> Answer:
        return read(engine.submit(self.request(question, tenant, store=store)))

    def close(self) -> None:
        self.store.close()
        self.on_disk.close()


def _weave(num_layers: int) -> Strategy:
    """Rows are not weighed by cost: random weights look at all alike, and those at the front of the
    prompt would win everywhere."""
    strategy = open_strategy("weave", ModelFacts(num_layers))
    assert isinstance(strategy.selector, QueryAttention), "it chooses by a probe"
    return replace(strategy, selector=replace(strategy.selector, late=0.0))


def read(ticket: Ticket, patience_s: float = PATIENCE_S) -> Answer:
    """Wait for an answer, not for ever."""
    is_stuck = not ticket.wait(patience_s)
    if is_stuck:
        ticket.cancel()
    tokens: list[int] = []
    error: BaseException | None = None
    if not is_stuck:
        try:
            tokens += (choice.token_id for choice in ticket)
        except Exception as raised:
            error = raised
    line = ticket.timeline
    ended_s = line.finished_s or time.perf_counter()
    record = ticket.record
    whys = () if record is None else tuple(str(c.why) for c in record.chunks if c.why)
    thoughts = tuple(ticket.distributions)
    return Answer(tuple(tokens), thoughts, error, ended_s - line.submitted_s, whys, is_stuck)


def distance(mine: Answer, other: Answer) -> float:
    """Of what was thought of each token, as long as both are about the same ones; the largest."""
    worst = 0.0
    for place, (a, b) in enumerate(zip(mine.thoughts, other.thoughts, strict=False)):
        a, b = (x.double() - x.double().mean() for x in (a, b))
        far = float((a - b).norm() / b.norm())
        worst = max(worst, far if far == far else float("inf"))  # one that is no number is far
        if mine.tokens[place : place + 1] != other.tokens[place : place + 1]:
            break
    return worst if mine.thoughts else float("inf")


def all_questions() -> list[Question]:
    """Some prompts, in full, woven and reused."""
    rng = random.Random(1)
    found = []
    for number in range(4):
        places = tuple(rng.sample(range(CHUNKS), K))
        found += [
            Question(places, number, FUSED, REUSE),
            Question(places, number, FUSED, WEAVE),
            Question(places, number, FULL),
        ]
    return found


def of_kind(questions: Sequence[Question], how: str, seed: int) -> Question:
    some = [each for each in questions if each.how == how]
    return some[seed % len(some)]
