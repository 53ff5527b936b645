"""What holds for all answers of one Weave, or of one gateway."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, get_args

from kvweave.app.answer.conversations import Conversations, ConversationScope
from kvweave.app.answer.search_pace import Paces
from kvweave.app.audit.auditor import AuditConfig
from kvweave.app.library.chunk_uses import ChunkUses
from kvweave.app.library.document_memory import DocumentMemoryConfig
from kvweave.app.library.library_kv import CODEC
from kvweave.app.question import QuestionDefaults, SpeculationMode
from kvweave.calibrate.profiles import Profile
from kvweave.config import WeaveConfig, given
from kvweave.errors import ConfigError
from kvweave.text.prompt import SYSTEM

NO_LIBRARY = "no knowledge base is open; use Weave.open('./kb') or --kb DIR"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """When prompts are computed before the search for their chunks is over."""

    mode: SpeculationMode = (
        "auto"  # "on" guesses at every stage, "auto" where it is expected to gain time
    )
    # no guess begins while so many prompts are to be computed; None: as many as the target takes
    max_prefill_bs: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in get_args(SpeculationMode):
            known = ", ".join(get_args(SpeculationMode))
            raise ConfigError(f"no speculation {self.mode!r}; known: {known}")
        if self.max_prefill_bs is not None and self.max_prefill_bs < 1:
            raise ConfigError("SpeculationConfig.max_prefill_bs must be at least 1")


class LookUp(Protocol):
    """Runs a search, perhaps on another thread, and waits for it."""

    def __call__(self, search: Callable[[], T], /) -> T: ...


def at_once(search: Callable[[], T], /) -> T:
    """On the thread that asks."""
    return search()


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """What holds for all answers of one Weave."""

    system: str = SYSTEM  # the system prompt, unless a question brings another
    tenant: str = ""  # whose it is: tenants share no exact KV and no conversations
    speculation: SpeculationConfig | None = None  # None: where it is expected to gain time
    profile: Profile | None = None  # what was measured of the model; None: the user's, the packaged
    usual: QuestionDefaults = field(default_factory=QuestionDefaults)  # what questions leave open
    # what is remembered of documents, where there is no knowledge base
    documents: DocumentMemoryConfig = field(default_factory=DocumentMemoryConfig)
    audit: AuditConfig = field(default_factory=AuditConfig)  # of fused answers, in idle time
    look_up: LookUp = at_once  # runs searches: a catalogue keeps a connection per thread
    # where conversations are remembered; another's, if they are to outlive this Weave
    conversations: Conversations | ConversationScope = field(default_factory=Conversations)
    paces: Paces = field(default_factory=Paces)  # what speculation knows already; likewise
    uses: ChunkUses = field(default_factory=ChunkUses)  # which chunks were in prompts; likewise

    @classmethod
    def of(cls, config: WeaveConfig) -> "AnswerSettings":
        """What a configuration says."""
        system, library = config.model.system, config.library
        return cls(
            SYSTEM if system is None else system,
            speculation=SpeculationConfig(**given(config.speculation)),
            usual=QuestionDefaults.from_config(config),
            documents=DocumentMemoryConfig(
                library.remembered_bytes, library.promotion, config.store.codec or CODEC
            ),
            audit=AuditConfig.of(config.quality),
        )
