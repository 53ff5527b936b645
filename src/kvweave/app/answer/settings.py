"""What holds for all answers of one Weave, or of one gateway."""

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from kvweave.app.answer.conversations import Conversations
from kvweave.app.answer.guessing import Paces
from kvweave.app.answer.question import QuestionDefaults
from kvweave.app.library.document_memory import DocumentMemoryConfig
from kvweave.calibrate.profiles import Profile
from kvweave.config import PlannerSettings, SpeculationSettings, WeaveConfig
from kvweave.engine.sampling import Sampling
from kvweave.errors import ModelCorrupt, RequestError
from kvweave.model.files.generation import FILE, unless_greedy
from kvweave.text.prompt import SYSTEM
from kvweave.types import ChunkId

NO_LIBRARY = "no knowledge base is open; use Weave.open('./kb') or --kb DIR"
T = TypeVar("T")
MOST_COUNTED = 100_000  # chunks with a count; beyond that the rarest half starts anew


class LookUp(Protocol):
    """Runs a search, perhaps on another thread, and waits for it."""

    def __call__(self, search: Callable[[], T], /) -> T: ...


def at_once(search: Callable[[], T], /) -> T:
    """Run a search on the thread that asks."""
    return search()


Fields = Mapping[str, Any] | None  # of `Sampling`, that are chosen


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """How answers are drawn where a request does not say it. Raises ModelCorrupt for a model whose
    own values cannot be.

    request > configuration > the model's generation_config.json > built in
    """

    configured: Mapping[str, Any] = field(default_factory=dict)  # by the user
    of_model: Mapping[str, Any] = field(default_factory=dict)  # by its makers: `read_generation`

    def __post_init__(self) -> None:
        try:
            Sampling(**self.of_model)
        except RequestError as error:
            raise ModelCorrupt(f"{FILE} of the model: {error}; correct the file") from error

    def sampling(self, asked: Fields = None, built_in: Fields = None) -> Sampling:
        """With what a request `asked` for. `built_in` stands behind everything else, in front of
        the defaults of `Sampling`. Raises RequestError."""
        chosen = {**self.configured, **(asked or {})}
        of_model = unless_greedy(self.of_model, chosen.get("temperature"))
        return Sampling(**{**(built_in or {}), **of_model, **chosen})


class ChunkUses:
    """How often each chunk of a knowledge base was in a prompt, since the process began. Any
    thread; nothing here waits."""

    def __init__(self, most: int = MOST_COUNTED) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._counts: Counter[ChunkId] = Counter()

    def saw(self, chunk_ids: Sequence[ChunkId]) -> None:
        """A prompt with these chunks was computed."""
        with self._lock:
            for chunk_id in chunk_ids:
                self._counts[chunk_id] += 1
            if len(self._counts) > self._most:
                self._counts = Counter(dict(self._counts.most_common(self._most // 2)))

    def count(self, chunk_id: ChunkId) -> int:
        with self._lock:
            return self._counts.get(chunk_id, 0)

    def most(self, limit: int) -> list[tuple[ChunkId, int]]:
        """The chunks that were in most prompts, and in how many."""
        with self._lock:
            return self._counts.most_common(limit)


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """What holds for all answers of one Weave."""

    system: str = SYSTEM  # the system prompt, unless a question brings another
    tenant: str = ""  # whose it is: tenants share no exact KV and no conversations
    # whether prompts are computed before the search for their chunks is over
    speculation: SpeculationSettings = field(default_factory=SpeculationSettings)
    profile: Profile | None = None  # what was measured of the model; None: the user's, the packaged
    usual: QuestionDefaults = field(default_factory=QuestionDefaults)  # what questions leave open
    planner: PlannerSettings = field(default_factory=PlannerSettings)
    # what is remembered of documents, where there is no knowledge base
    documents: DocumentMemoryConfig = field(default_factory=DocumentMemoryConfig)
    look_up: LookUp = at_once  # runs searches: a catalogue keeps a connection per thread
    # where conversations are remembered; another's, if they are to outlive this Weave
    conversations: Conversations = field(default_factory=Conversations)
    paces: Paces = field(default_factory=Paces)  # what speculation knows already; likewise
    uses: ChunkUses = field(default_factory=ChunkUses)  # which chunks were in prompts; likewise

    @classmethod
    def from_config(cls, config: WeaveConfig) -> "AnswerSettings":
        """What a configuration says."""
        system, library = config.model.system, config.library
        return cls(
            SYSTEM if system is None else system,
            speculation=config.speculation,
            usual=QuestionDefaults.from_config(config),
            planner=config.planner,
            documents=DocumentMemoryConfig(
                library.remembered_bytes, library.promotion, config.store
            ),
        )
