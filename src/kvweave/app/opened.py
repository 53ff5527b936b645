"""A model, its engine and perhaps a knowledge base, open together: how long, and what is known.

Part of the composition root: `app.py` is the face of it.
"""

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Self

from kvweave.app.answer.answerer import Answerer, LookUp, at_once
from kvweave.app.answer.conversations import Conversations, ConversationScope
from kvweave.app.answer.engine_client import EngineClient
from kvweave.app.question import TOP_K
from kvweave.calibrate.profiles import Profile
from kvweave.engine.config import EngineConfig
from kvweave.engine.engine import Engine
from kvweave.fuse.strategy import ModelFacts
from kvweave.model.decoder import Decoder
from kvweave.model.files.locate import locate
from kvweave.model.load import load_decoder
from kvweave.plan.ordering import PROMOTION
from kvweave.text.prompt import SYSTEM
from kvweave.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from kvweave.app.answer.speculation import Mode, SpeculationConfig
    from kvweave.app.library.library import Library, OpenEmbedder
    from kvweave.types import Hit


class Opened:
    """May be used from many threads: one engine computes for all of them. `close` when done, or use
    `with`."""

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer,
        name: str,
        system: str,
        library: "Library | None" = None,
        engine: EngineConfig | None = None,
        speculation: "SpeculationConfig | None" = None,
        promotion: int = PROMOTION,
        *,
        asking: EngineClient | None = None,
        tenant: str = "",
        look_up: LookUp = at_once,
        conversations: Conversations | ConversationScope | None = None,
    ) -> None:
        """`promotion`: requests that bring a chunk which was never ingested before its KV is stored
        with the knowledge base; 0: never. `asking` is another Weave's, whose engine is shared;
        `tenant` is whose knowledge base it is: tenants share no exact KV. `look_up` runs searches,
        on threads of its choice: a catalogue keeps a connection per thread. `conversations` where
        they are remembered beyond this Weave."""
        self.model_name = name
        self.system = system
        self._decoder = decoder
        self._tokenizer = tokenizer
        self._library = library
        self._look_up = look_up
        self._owns_engine = asking is None
        self._ingesting = threading.Lock()
        self._replying = Answerer(
            decoder,
            tokenizer,
            asking or EngineClient(decoder, engine),
            system,
            library,
            None if library is None else self.search,
            speculation=speculation,
            promotion=promotion,
            tenant=tenant,
            look_up=look_up,
            conversations=conversations,
        )

    @classmethod
    def open(
        cls,
        kb: str | Path | None = None,
        *,
        model: str = "smollm2",
        device: str = "auto",
        dtype: str = "auto",
        quant: str = "none",
        system: str = SYSTEM,
        embedder: str | None = None,
        encoding: str | None = None,
        extras: Sequence[str] | None = None,
        promotion: int = PROMOTION,
        speculate: "Mode" = "auto",
    ) -> Self:
        """Load a model: an embedded name, a folder, a .gguf file or a hub id.

        `kb` is the folder of a knowledge base, made if it is not there, whose embedder is loaded as
        well; None does without one. `embedder` None is the one it was made with, MiniLM for a new
        one. `encoding` is the encoding context of chunk KV ("isolated", "filler:4", "neighbours:3";
        "neighbours" are as many as calibration found for the model, 3 if it did not) and `extras`
        what is stored beside it; None, each for itself, is what the knowledge base has, filler
        without extras for a new one. `promotion`: how many requests bring a document that was never
        ingested before its KV is stored with the knowledge base; 0: never. `speculate` computes
        prompts while their chunks are searched for: "auto" where that is expected to gain time,
        "on" always, "off" never.
        """
        folder = locate(model)
        decoder = load_decoder(folder, device=device, dtype=dtype, quant=quant)
        tokenizer = Tokenizer(folder)
        path = Path(model).expanduser()
        name = path.resolve().name if path.exists() else model  # resolved, for `--model .`
        if kb is None:
            return cls(decoder, tokenizer, name, system)
        from kvweave.app.answer.speculation import SpeculationConfig
        from kvweave.app.library.library import Library

        guessing = SpeculationConfig(speculate)
        library = Library.open(Path(kb), decoder, tokenizer, system, embedder, encoding, extras)
        with ExitStack() as stack:  # an embedder that does not load leaves nothing open
            stack.callback(library.close)
            library.kb.warm()
            stack.pop_all()
        return cls(decoder, tokenizer, name, system, library, None, guessing, promotion)

    def over(
        self,
        folder: Path,
        *,
        open_embedder: "OpenEmbedder | None" = None,
        encoding: str | None = None,
        tenant_salt: str = "",
        look_up: LookUp = at_once,
        host_bytes: int | None = None,
        conversations: Conversations | ConversationScope | None = None,
    ) -> Self:
        """Another with the same model over another knowledge base, made if it is not there.

        The two share an engine. Close this one last. `look_up` and `conversations` as for one by
        itself; `host_bytes` is what its host tier may have, None the usual.
        """
        from kvweave.app.library.library import Library

        library = Library.open(
            folder,
            self._decoder,
            self._tokenizer,
            self.system,
            encoding=encoding,
            open_embedder=open_embedder,
            tenant_salt=tenant_salt,
            host_bytes=host_bytes,
        )
        return type(self)(
            self._decoder,
            self._tokenizer,
            self.model_name,
            self.system,
            library,
            asking=self._replying.asking,
            tenant=tenant_salt,
            look_up=look_up,
            conversations=conversations,
        )

    def is_at_rest(self) -> bool:
        """No request that is over still holds chunk KV of the open knowledge base. Waits for the
        engine's step, in which it hears who has left."""
        self.engine.run_alone(lambda: None)
        return self.library.store.num_pinned() == 0

    def close(self) -> None:
        """Finish writing chunk KV, keep what was learnt of the machine, let go of everything."""
        self._replying.close(with_engine=self._owns_engine)
        if self._library is not None:
            self._library.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def profile(self) -> Profile | None:
        """What was measured of the model: the user's profile, or the packaged one."""
        return self._replying.ways.profile

    @property
    def facts(self) -> ModelFacts:
        """What strategies must know of the model, from its profile if it has one."""
        return self._replying.ways.facts

    @property
    def max_context(self) -> int:
        """Tokens that prompt and answer may have together."""
        return self._decoder.spec.max_context

    @property
    def engine(self) -> Engine:
        """What computes; started if it is not yet."""
        return self._replying.asking.engine

    @property
    def library(self) -> "Library":
        """The open knowledge base."""
        return self._replying.ways.library

    def measure(self) -> None:
        """Measure this machine for reuse="auto" now, unless it was measured before; otherwise the
        first who asks for "auto" waits for it. Seconds, in which nothing is answered."""
        self._replying.ways.measure()

    def search(self, question: str, k: int = TOP_K) -> "list[Hit]":
        """The chunks of the knowledge base nearest to `question`, best first."""
        kb = self.library.kb
        return self._look_up(lambda: kb.search(question, k))
