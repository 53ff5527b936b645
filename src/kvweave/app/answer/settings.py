"""What holds for all answers of one Weave, or of one gateway."""

from dataclasses import dataclass, field

from kvweave.app.answer.conversations import Conversations, ConversationScope
from kvweave.app.answer.search_pace import Paces
from kvweave.app.answer.speculation import LookUp, SpeculationConfig, at_once
from kvweave.app.audit.auditor import AuditConfig
from kvweave.app.library.chunk_uses import ChunkUses
from kvweave.app.library.document_memory import DocumentMemoryConfig
from kvweave.app.library.library_kv import CODEC
from kvweave.app.question import QuestionDefaults
from kvweave.calibrate.profiles import Profile
from kvweave.config import WeaveConfig, given
from kvweave.text.prompt import SYSTEM

NO_LIBRARY = "no knowledge base is open; use Weave.open('./kb') or --kb DIR"


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
            usual=QuestionDefaults.of(config),
            documents=DocumentMemoryConfig(
                library.remembered_bytes, library.promotion, config.store.codec or CODEC
            ),
            audit=AuditConfig.of(config.quality),
        )
