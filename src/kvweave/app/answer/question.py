"""What a caller asks for: a question with everything that goes with it, checked in one place.

An option is a field of `Question`. What people are told of it, in flags, the schema of requests and
the web page, stands with the field (`option`), or with the setting that holds for questions which
leave it open (`configurable`). Imports no torch: the command line reads it to show its help.
"""

# ruff: noqa: RUF009 - `option` and `configurable` make fields

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, get_args

from kvweave.calibrate.gate import BOUND as BOUND
from kvweave.config import LibrarySettings, QualitySettings, WeaveConfig, given_values, known_keys
from kvweave.config_keys import Key, Kind
from kvweave.corpus.metadata import MetadataFilter
from kvweave.corpus.search import Retrieval, SearchOptions
from kvweave.errors import ConfigError, RequestError
from kvweave.plan.ordering import OrderPermission
from kvweave.text.json_grammar import ANY_OBJECT as ANY_OBJECT
from kvweave.text.prompt import Document
from kvweave.text.tool_calls import MOST_TOOLS as MOST_TOOLS
from kvweave.text.tool_calls import TOOL_CHOICES as TOOL_CHOICES
from kvweave.text.tool_calls import Message, ToolUse, texts_of_tools
from kvweave.types import ChunkId

if TYPE_CHECKING:
    from kvweave.engine.sampling import Sampling

TOP_K = LibrarySettings().k  # chunks that are put in front of a question
AUTO = "auto"  # a `reuse` that is no strategy: the planner chooses one
ORDER = OrderPermission(QualitySettings().order)  # of chunks, unless a question says it
PLAIN_REUSES = (AUTO, "prefix", "full")  # of a prompt without chunks
SpeculationMode = Literal["auto", "on", "off"]
NothingMode = Literal["say", "answer"]  # where no chunk is found


def option(default: Any, help: str, flag: str, *, unset: str = "", label: str = "") -> Any:
    """An option with its help text and its flag, as `setting` has them for a key; what None means,
    in words (`unset`); and for a control on the web page its `label`."""
    said = {"help": help, "flag": flag, "unset": unset, "label": label}
    made = {"default_factory": default} if callable(default) else {"default": default}
    return field(**made, metadata=said)


def configurable(key: str, *, is_filled: bool = True, label: str = "") -> Any:
    """An option that is None unless a question has it: then the configuration's `key` holds, whose
    help text and flag are also its. `is_filled` False: not by `Question.fill_in`, but where the
    option is used."""
    return field(default=None, metadata={"key": key, "is_filled": is_filled, "label": label})


class ChatOptions(TypedDict, total=False):
    """Keyword arguments of `Weave.chat`; `Question` says what each means."""

    sampling: "Sampling | None"
    reuse: str | None
    tenant: str
    model: str | None
    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool


class CompletionOptions(TypedDict, total=False):
    """Keyword arguments of `Weave.complete`; `Question` says what the first three mean."""

    sampling: "Sampling | None"
    reuse: str | None
    tenant: str
    model: str | None
    transfer: "KVTransfer | None"  # where chunks stand among token ids


@dataclass(frozen=True, slots=True)
class PlainOptions:
    """How a prompt without chunks is answered. Raises RequestError if it cannot be meant."""

    sampling: "Sampling | None" = None  # None: as the Weave draws
    reuse: str | None = None  # "full" computes all of it; else what is exact is reused
    tenant: str = ""  # whose it is; "": the Weave's own
    tool_use: ToolUse | None = None  # what the model may call; None: nothing

    def __post_init__(self) -> None:
        if self.reuse not in (None, *PLAIN_REUSES):
            known = ", ".join(PLAIN_REUSES)
            raise RequestError(
                f"reuse {self.reuse!r} needs chunks; a prompt without any takes {known}"
            )

    @classmethod
    def from_chat(cls, options: ChatOptions) -> "PlainOptions":
        """Read the options of a chat. Raises RequestError for tools that cannot be meant."""
        tools, choice = options.get("tools", ()), options.get("tool_choice")
        parallel = options.get("parallel_tool_calls", True)
        use = ToolUse.parse(tools, choice, parallel=parallel)
        sampling, reuse = options.get("sampling"), options.get("reuse")
        return cls(sampling, reuse, options.get("tenant", ""), use)


@dataclass(frozen=True, slots=True)
class KVTransfer:
    """Where chunks stand in a prompt of token ids, and how their KV may be reused: what a gateway
    sends with it (docs/gateway.md). Raises RequestError if it cannot be meant."""

    chunks: tuple[tuple[int, int], ...] = ()  # half-open spans, in order
    preamble: int | None = None  # tokens in front of everything; None: in front of the chunks
    reuse: str | None = None  # as in `Question`, and the next two
    ratio: float | None = None
    bound: float | None = None
    asked: tuple[int, int] | None = None  # what the user wrote; None: all behind the chunks
    tenant: str = ""  # of the gateway: tenants share no KV
    forget: tuple[ChunkId, ...] = ()  # chunks that are no more there: nothing is kept of them

    def __post_init__(self) -> None:
        at = 0
        for start, end in self.chunks:
            if not at <= start < end:
                raise RequestError(
                    f"chunk [{start}, {end}) is empty or begins before {at}; give half-open spans "
                    "of tokens in order"
                )
            at = end

    def tenant_of(self, tenant: str) -> str:
        """Whose KV it is, of a server's own `tenant` and the gateway's."""
        return f"{tenant}/{self.tenant}" if self.tenant else tenant  # no tenant's name has a slash


@dataclass(frozen=True, slots=True)
class Question:
    """One question. Raises RequestError if it cannot be meant."""

    question: str
    documents: Sequence[Document | str] | None = None  # None: the nearest chunks there are
    sampling: "Sampling | None" = None  # None: as the Weave draws
    system: str | None = None  # in place of the Weave's own system prompt
    model: str | None = None  # of a gateway that has several; None: the usual one
    tenant: str = ""  # whose conversation it is; "": the Weave's own
    history: Sequence[Mapping[str, Any]] = field(default=())  # what was said, a user's first
    conversation_id: str | None = None  # which conversation the history is of
    recognise: bool | None = configurable("library.recognise")
    # how chunks are found, see `SearchOptions`
    query: str | None = None  # what is searched for; None: the question
    k: int | None = configurable("library.k", label="passages")
    retrieval: Retrieval | None = configurable("library.retrieval")
    min_score: float | None = configurable("library.min_score")
    reranker: str | None = configurable("library.reranker")
    filter: Mapping[str, Any] = option(
        dict, "Only documents with this metadata", "--filter KEY=VALUE"
    )
    rewrite: bool | None = configurable("library.rewrite")
    nothing_found: NothingMode | None = configurable("library.nothing_found")
    cite: bool = option(False, "Put numbers of sources behind sentences", "--cite")
    # how the prompt is computed
    reuse: str | None = configurable("quality.reuse", is_filled=False)  # see `answer/router.py`
    ratio: float | None = option(
        None,
        "Share of reused tokens to recompute; implies weave",
        "--ratio",
        unset="the strategy's own",
    )
    bound: float | None = configurable("quality.bound")
    order: str | None = configurable("quality.order")  # see OrderPermission
    speculate: SpeculationMode | None = configurable("speculation.mode", is_filled=False)
    # what the model may call, as OpenAI's API has it: see `text/tool_calls.py`
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] | None = None  # None: as the model likes
    parallel_tool_calls: bool = True  # several calls in one answer are welcome
    since: Sequence[Message] = ()  # what was called for this question before, and its results
    # for measurements: what the model thought of the first so many tokens (`Answer.watched`), an
    # answer that is put into its mouth instead of a drawn one, and whether the prompt reads nothing
    # of the knowledge tree and leaves nothing there
    watched: int = 0
    forced: Sequence[int] = ()
    alone: bool = False

    def __post_init__(self) -> None:
        if self.bound is not None and not 0.0 <= self.bound < math.inf:
            raise RequestError(
                f"bound {self.bound:g} is no number of nats from 0 on; give one such as {BOUND:g}"
            )
        check_order(self.order)
        if self.speculate not in (None, *get_args(SpeculationMode)):
            known = ", ".join(get_args(SpeculationMode))
            raise RequestError(f"speculate {self.speculate!r} is unknown; known: {known}")
        if self.reuse is not None and not _is_reuse(self.reuse):
            raise RequestError(f"reuse {self.reuse!r} {_say_unknown(self.reuse)}")
        if self.nothing_found not in (None, *get_args(NothingMode)):
            known = ", ".join(get_args(NothingMode))
            raise RequestError(f"nothing_found {self.nothing_found!r} is unknown; known: {known}")
        _ = self.search, self.tool_use
        check_since(self.since)
        if self.reuse == AUTO and self.ratio is not None:
            raise RequestError("reuse 'auto' chooses the ratio itself; leave it out")
        refuse_empty(self.question)

    @property
    def drawn(self) -> "Sampling":
        from kvweave.engine.sampling import Sampling

        return self.sampling or Sampling()

    @property
    def num_chunks(self) -> int:
        """Chunks to take from the knowledge base."""
        return TOP_K if self.k is None else self.k

    @property
    def search(self) -> SearchOptions:
        """How chunks are found. Raises RequestError if it cannot be meant."""
        wanted = MetadataFilter.parse(self.filter)
        return SearchOptions(self.retrieval or "vector", self.min_score, wanted, self.reranker)

    @property
    def tool_use(self) -> ToolUse | None:
        """What the model may call; None: nothing. Raises RequestError if it cannot be meant."""
        return ToolUse.parse(self.tools, self.tool_choice, parallel=self.parallel_tool_calls)

    @property
    def given_documents(self) -> list[Document]:
        """The documents that it brings."""
        return [Document(d) if isinstance(d, str) else d for d in self.documents or ()]

    @property
    def texts(self) -> list[str]:
        """All words that it brings for its prompt."""
        said = [*self.history, *self.since]
        texts = [self.question, self.system or ""]
        texts += [str(message.get("content")) for message in said]
        texts += texts_of_tools(self.tools, said)
        return texts + [each.title + each.text for each in self.given_documents]

    @property
    def searched(self) -> str:
        """What chunks are searched for by."""
        return self.query or self.question

    @property
    def permission(self) -> OrderPermission:
        """Whether chunks may move."""
        return OrderPermission(ORDER if self.order is None else self.order)

    @property
    def allowed(self) -> float:
        """Nats per token that reuse may cost."""
        return BOUND if self.bound is None else self.bound

    def fill_in(self, usual: "QuestionDefaults", kb_order: str | None = None) -> "Question":
        """Return this question with what it leaves open as its knowledge base (`kb_order`), or else
        the configuration, has it."""
        open_ones = {name: key for name, key in FILLED.items() if getattr(self, name) is None}
        values = {name: usual.value(key) for name, key in open_ones.items()}
        if self.reuse is None and self.ratio is None:
            values["reuse"], values["ratio"] = usual.reuse, usual.ratio
        reads_nothing = self.alone or values.get("reuse", self.reuse) == "full"
        if self.order is None and reads_nothing:
            values["order"] = OrderPermission.AS_FOUND  # it gains nothing by another order
        elif self.order is None and kb_order is not None:
            values["order"] = kb_order
        return replace(self, **values)


# options that `fill_in` knows → their keys
FILLED = {f.name: f.metadata["key"] for f in fields(Question) if f.metadata.get("is_filled")}


class QuestionOption(NamedTuple):
    """What is said of an option: as a key of the configuration, which it is or looks like."""

    key: Key
    label: str  # of its control on the web page; "": it has none


def question_options(question: type = Question) -> dict[str, QuestionOption]:
    """Return the options that have a help text, by the names of their fields."""
    found = {}
    for each in fields(question):
        said = each.metadata
        if "key" in said:
            key = known_keys()[said["key"]]
        elif "help" in said:
            default = None if each.default is MISSING else each.default
            words = [said[name] for name in ("unset", "help", "flag")]
            key = Key("", each.name, question, Kind.from_hint(each.type), default, *words)
        else:
            continue
        found[each.name] = QuestionOption(key, said["label"])
    return found


@dataclass(frozen=True, slots=True)
class QuestionDefaults:
    """What holds for questions that do not say it: a configuration's. Raises ConfigError for a
    `reuse` that cannot be."""

    quality: QualitySettings = field(default_factory=QualitySettings)
    library: LibrarySettings = field(default_factory=LibrarySettings)
    # fields of `Sampling` that the user configured; the others are the model's, or built in
    sampling: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parse_reuse(self.quality.reuse)

    @classmethod
    def from_config(cls, config: WeaveConfig) -> "QuestionDefaults":
        return cls(config.quality, config.library, given_values(config.sampling))

    def value(self, key: str) -> Any:
        """Return the value of a key by its dotted name, such as "library.k"."""
        section, _, name = key.partition(".")
        return getattr(getattr(self, section), name)

    @property
    def reuse(self) -> str | None:
        return parse_reuse(self.quality.reuse)[0]

    @property
    def ratio(self) -> float | None:
        return parse_reuse(self.quality.reuse)[1]

    @property
    def search(self) -> SearchOptions:
        """How chunks are found."""
        library = self.library
        return SearchOptions(library.retrieval, library.min_score, reranker=library.reranker)


def check_order(order: str | None) -> None:
    """Raises RequestError where this is no OrderPermission."""
    if order is not None and order not in list(OrderPermission):
        raise RequestError(f"order {order!r} is unknown; known: {', '.join(OrderPermission)}")


def check_since(since: Sequence[Message]) -> None:
    """Raises RequestError where these are no calls and their results."""
    roles = [message.get("role") for message in since]
    if roles and (set(roles) != {"assistant", "tool"} or roles[-1] != "tool"):
        raise RequestError(
            "behind the last question stand calls of the assistant and their results, a result last"
        )


def parse_reuse(text: str | None) -> tuple[str | None, float | None]:
    """A strategy, with a ratio if one stands behind it: "weave:0.15". Raises ConfigError."""
    if text is None:
        return None, None
    from kvweave.fuse.selectors.strategies import split_ratio

    name, ratio = split_ratio(text)
    if not _is_reuse(name):
        raise ConfigError(f"reuse {name!r} {_say_unknown(name)}")
    try:
        share = None if ratio is None else float(ratio)
    except ValueError:
        share = math.nan
    if share is not None and (name == AUTO or not 0.0 <= share <= 1.0):
        raise ConfigError(f"reuse {text!r}: write a strategy and a share of rows, as weave:0.15")
    return name, share


def _is_reuse(name: str) -> bool:
    from kvweave.fuse.selectors.strategies import is_known

    return name == AUTO or is_known(name)


def _say_unknown(name: str) -> str:
    from kvweave.fuse.selectors.strategies import known_names, say_unknown

    return say_unknown(name, ("full", AUTO, *(each for each in known_names() if each != "full")))


def refuse_empty(question: str) -> None:
    if not question.strip():
        raise RequestError("the question is empty; ask something")
