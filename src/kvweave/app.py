"""The composition root: opens a model and answers.

`Weave` is what the library, the command line and the server share. It may be used from many
threads: each request owns its state, and the decoder runs one step at a time.
"""

import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kvweave.detokenizer import Detokenizer, StopMatcher
from kvweave.engine.generate import generate
from kvweave.engine.sampling import Choice, Sampling
from kvweave.errors import RequestError
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from kvweave.model.locate import locate
from kvweave.prompt import SYSTEM, Document, Prompt, build_prompt
from kvweave.tokenizer import Tokenizer

__all__ = ["Answer", "Answering", "Document", "Piece", "Sampling", "TokenLogprob", "Weave"]


class TokenLogprob(NamedTuple):
    """What the model thought of a token it gave."""

    token: str
    logprob: float  # natural logarithm
    alternatives: tuple[tuple[str, float], ...]  # likeliest first


class Piece(NamedTuple):
    """A bit of an answer as it is made."""

    text: str  # may be empty: a token can end in the middle of a character
    logprob: TokenLogprob | None = None  # set when Sampling.logprobs is


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer."""

    text: str
    finish_reason: str  # "stop": the model or a stop string ended it; "length": no room left
    prompt_tokens: int
    completion_tokens: int
    ttft_ms: float  # from the call to the first token
    total_ms: float
    logprobs: tuple[TokenLogprob, ...] = ()


class Weave:
    """Answers questions over documents with one loaded model."""

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer, name: str, system: str) -> None:
        self.model_name = name
        self.system = system
        self._decoder = decoder
        self._tokenizer = tokenizer
        self._turn = threading.Lock()  # held for one decoder step

    @classmethod
    def open(
        cls,
        *,
        model: str = "smollm2",
        device: str = "auto",
        dtype: str = "auto",
        quant: str = "none",
        system: str = SYSTEM,
    ) -> "Weave":
        """Load a model: an embedded name, a folder, a .gguf file or a hub id."""
        folder = locate(model)
        decoder = load_decoder(folder, device=device, dtype=dtype, quant=quant)
        name = Path(model).name if Path(model).exists() else model
        return cls(decoder, Tokenizer(folder), name, system)

    @property
    def max_context(self) -> int:
        """Tokens that prompt and answer may have together."""
        return self._decoder.spec.max_context

    def ask(
        self,
        question: str,
        *,
        documents: Sequence[Document | str] = (),
        sampling: Sampling | None = None,
    ) -> Answer:
        """Answer from `documents` (texts, or Documents with a title)."""
        return self.stream(question, documents=documents, sampling=sampling).finish()

    def stream(
        self,
        question: str,
        *,
        documents: Sequence[Document | str] = (),
        sampling: Sampling | None = None,
    ) -> "Answering":
        """As `ask`, piece by piece."""
        prompt = self.build_prompt(question, documents)
        return self._start(prompt.token_ids, sampling)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, sampling: Sampling | None = None
    ) -> "Answering":
        """Continue a conversation of {"role", "content"} messages."""
        if not messages:
            raise RequestError("messages is empty; send at least one")
        return self._start(self._tokenizer.encode(self._tokenizer.render_chat(messages)), sampling)

    def build_prompt(self, question: str, documents: Sequence[Document | str] = ()) -> Prompt:
        """The prompt `ask` would use, by part."""
        if not question.strip():
            raise RequestError("the question is empty; ask something")
        texts = [Document(d) if isinstance(d, str) else d for d in documents]
        return build_prompt(self._tokenizer, question, texts, self.system)

    def _start(self, prompt_ids: Sequence[int], sampling: Sampling | None) -> "Answering":
        sampling = sampling or Sampling()
        eos_ids = self._tokenizer.eos_ids
        choices = generate(self._decoder, prompt_ids, sampling, eos_ids)
        return Answering(
            _taking_turns(choices, self._turn), self._tokenizer, sampling, len(prompt_ids)
        )


class Answering:
    """An answer in the making: iterate for pieces, then read `answer`. For one thread at a time.

    Nothing is computed before the first piece is asked for; `close` stops at the next token.
    """

    def __init__(
        self,
        choices: Iterator[Choice],
        tokenizer: Tokenizer,
        sampling: Sampling,
        prompt_tokens: int,
    ) -> None:
        self.answer: Answer | None = None
        self.prompt_tokens = prompt_tokens
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._made = _Made()
        self._pieces = self._make(choices)

    def __iter__(self) -> Iterator[Piece]:
        return self._pieces

    def finish(self) -> Answer:
        """Run to the end and return the whole answer."""
        for _ in self._pieces:
            pass
        assert self.answer is not None, "an answer was closed before it was finished"
        return self.answer

    def close(self) -> None:
        """Stop computing. `answer` stays None unless it was finished."""
        self._pieces.close()

    def _make(self, choices: Iterator[Choice]) -> Generator[Piece, None, None]:
        detokenizer, matcher = Detokenizer(self._tokenizer), StopMatcher(self._sampling.stop)
        made, reason = self._made, "length"
        for choice in choices:
            made.count()
            if choice.token_id in self._tokenizer.eos_ids:
                reason = "stop"
                break
            cut = matcher.push(detokenizer.push(choice.token_id))
            yield made.add(Piece(cut.text, self._logprob(choice)))
            if cut.stopped:
                self.answer = made.answer("stop", self.prompt_tokens)
                return
        cut = matcher.push(detokenizer.flush())
        rest = cut.text if cut.stopped else cut.text + matcher.flush()
        if rest:
            yield made.add(Piece(rest))
        self.answer = made.answer("stop" if cut.stopped else reason, self.prompt_tokens)

    def _logprob(self, choice: Choice) -> TokenLogprob | None:
        if choice.logprob is None:
            return None
        text = self._tokenizer.decode
        alternatives = tuple((text([i]), lp) for i, lp in choice.alternatives)
        return TokenLogprob(text([choice.token_id]), choice.logprob, alternatives)


@dataclass(slots=True)
class _Made:
    """What has been made so far, and when."""

    started_s: float = field(default_factory=time.perf_counter)
    first_s: float | None = None
    tokens: int = 0
    pieces: list[Piece] = field(default_factory=list)

    def count(self) -> None:
        self.tokens += 1
        if self.first_s is None:
            self.first_s = time.perf_counter()

    def add(self, piece: Piece) -> Piece:
        self.pieces.append(piece)
        return piece

    def answer(self, finish_reason: str, prompt_tokens: int) -> Answer:
        now = time.perf_counter()
        return Answer(
            text="".join(piece.text for piece in self.pieces),
            finish_reason=finish_reason,
            prompt_tokens=prompt_tokens,
            completion_tokens=self.tokens,
            ttft_ms=((self.first_s or now) - self.started_s) * 1e3,
            total_ms=(now - self.started_s) * 1e3,
            logprobs=tuple(p.logprob for p in self.pieces if p.logprob is not None),
        )


def _taking_turns(choices: Iterator[Choice], turn: threading.Lock) -> Iterator[Choice]:
    """Let one request's step run at a time."""
    while True:
        with turn:
            choice = next(choices, None)
        if choice is None:
            return
        yield choice
