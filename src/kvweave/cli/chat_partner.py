"""Who answers in `kvweave chat`: a model in this process, or a running server."""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvweave.cli.knowledge_bases import check_knowledge_base, open_weave
from kvweave.config import WeaveConfig, given_values
from kvweave.errors import RequestError

if TYPE_CHECKING:
    from kvweave.app.answer.answer_stream import PieceStream
    from kvweave.app.weave import Weave
    from kvweave.clients.server import ServerClient

Said = Sequence[dict[str, str]]  # messages of a chat


@dataclass(slots=True)
class ChatTold:
    """What is known of the last answer."""

    sources: list[dict[str, Any]] = field(default_factory=list)
    strategy: str = ""
    tokens: dict[str, int] = field(default_factory=dict)  # of the prompt, by what became of them
    why: str | None = None  # no more was reused
    ttft_ms: float | None = None


class ChatPartner(ABC):
    """Answers one conversation at a time. For one thread; `close` it."""

    def __init__(self, config: WeaveConfig, reuse: str | None) -> None:
        self.kb: str | None = None  # where it answers from
        self.reuse = reuse  # how; None: as is usual
        self.told = ChatTold()  # of the last answer
        self._config = config
        self._name = secrets.token_hex(8)  # of the conversation

    @abstractmethod
    def use_kb(self, name: str | None) -> None:
        """Answer from this knowledge base from now on; None: from none. Raises KVWeaveError, and
        then the one before stays."""

    @abstractmethod
    def answer(self, messages: Said) -> Iterator[str]:
        """The answer to the last message, piece by piece. Raises KVWeaveError."""

    @abstractmethod
    def close(self) -> None: ...

    def begin_again(self) -> None:
        """The next answer is of another conversation."""
        self._name, self.told = secrets.token_hex(8), ChatTold()

    def _behind_system(self, messages: Said) -> list[dict[str, str]]:
        """The messages behind the system prompt of the configuration."""
        system = self._config.model.system
        return [*([] if system is None else [{"role": "system", "content": system}]), *messages]


class LocalPartner(ChatPartner):
    """A model in this process."""

    def __init__(self, config: WeaveConfig, kb: str | None, reuse: str | None) -> None:
        if kb is not None:
            check_knowledge_base(Path(kb))  # before the model is loaded
        super().__init__(config, reuse)
        self._weave = open_weave(config=config)
        self._over: Weave | None = None
        try:
            self.use_kb(kb)
        except BaseException:
            self.close()
            raise

    def use_kb(self, name: str | None) -> None:
        from kvweave.app.answer.settings import AnswerSettings
        from kvweave.app.library.library import embedder_opener
        from kvweave.app.library.library_kv import KVOptions

        opened = None
        if name is not None:
            check_knowledge_base(Path(name))
            settings = AnswerSettings.from_config(self._config)
            options = KVOptions.from_config(self._config)
            opener = embedder_opener(self._config.library)
            opened = self._weave.over(Path(name), options, settings, open_embedder=opener)
        before, self._over, self.kb = self._over, opened, name
        if before is not None:
            before.close()

    def answer(self, messages: Said) -> Iterator[str]:
        from kvweave.app.answer.question import PLAIN_REUSES, parse_reuse

        reuse, ratio = parse_reuse(self.reuse)
        sampling = self._weave.sampling(given_values(self._config.sampling))
        stream: PieceStream
        if self._over is not None:
            question, history = messages[-1]["content"], messages[:-1]
            stream = self._over.stream(
                question,
                history=history,
                conversation_id=self._name,
                reuse=reuse,
                ratio=ratio,
                sampling=sampling,
            )
        else:
            if reuse not in (None, *PLAIN_REUSES):
                known = ", ".join(PLAIN_REUSES)
                raise RequestError(f"reuse {reuse!r} needs a knowledge base (/kb); else: {known}")
            said = self._behind_system(messages)
            stream = self._weave.chat(said, sampling=sampling, reuse=reuse)
        try:
            for piece in stream:
                yield piece.text
            answer = stream.finish()
        finally:
            stream.close()
        record = answer.explain
        self.told = ChatTold(
            [source.as_json() for source in answer.sources],
            "full" if record is None else record.strategy,
            {} if record is None else dict(record.counts),
            None if record is None else record.why,
            answer.ttft_ms,
        )

    def close(self) -> None:
        if self._over is not None:
            self._over.close()
        self._weave.close()


class RemotePartner(ChatPartner):
    """A running server."""

    def __init__(
        self, client: "ServerClient", config: WeaveConfig, kb: str | None, reuse: str | None
    ) -> None:
        super().__init__(config, reuse)
        self._client = client
        client.models()  # whether it answers is found out before the first question
        self.use_kb(kb)

    def use_kb(self, name: str | None) -> None:
        if name is not None:
            self._client.kb(name)
        self.kb = name

    def answer(self, messages: Said) -> Iterator[str]:
        from kvweave.app.answer.question import parse_reuse

        fields: dict[str, Any] = {"explain": True, **given_values(self._config.sampling)}
        if self.reuse is not None:
            strategy, ratio = parse_reuse(self.reuse)
            fields["reuse"] = {"strategy": strategy, "ratio": ratio}
        if self.kb is not None:
            fields |= {"kb": self.kb, "conversation_id": self._name}
        told = ChatTold()
        for event in self._client.chat_events(self._behind_system(messages), **fields):
            for choice in event["choices"]:
                if text := choice["delta"].get("content"):
                    yield text
            told.sources = event.get("sources", told.sources)
            if (explained := event.get("explain")) is not None:
                told.strategy, told.tokens = explained["strategy"], explained["tokens"]
                told.why = explained["why"]
                told.ttft_ms = explained["timeline_ms"]["first_token"]
        self.told = told

    def close(self) -> None:
        """Nothing is kept open between two answers."""
