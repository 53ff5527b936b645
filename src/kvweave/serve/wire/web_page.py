"""What the web page begins with, the sample corpus, and conversations that the server keeps."""

from typing import Annotated, Any, Literal

from pydantic import Field

from kvweave.app.answer.question import Question, question_options
from kvweave.config_keys import Kind
from kvweave.serve.wire.base import Incoming, Outgoing, Text, attribute
from kvweave.serve.wire.kb import IngestOut


class DialOut(Outgoing):
    """A position of the dial from exact to fastest."""

    name: str
    reuse: str | dict[str, Any]  # for the field of a chat request
    words: str
    needs_chunks: bool  # only with `kb` or `documents`


class WayOut(Outgoing):
    """A `reuse` that a model is ready for."""

    name: str
    ratio: float  # where none is given; 0: it takes none


class RefusedWayOut(Outgoing):
    """A `reuse` that a model is not ready for."""

    name: str
    why: str


class ServedModelOut(Outgoing):
    """A model that a request may name, and what can be asked of it."""

    name: str
    context: int | None  # tokens of prompt and answer together; null: not known
    dial: list[DialOut]
    strategies: list[WayOut]  # what can be compared
    refused: list[RefusedWayOut]  # what cannot


class ControlOut(Outgoing):
    """An option of a question that has a control on the web page."""

    name: str  # of a field of a chat request
    label: str
    help: str
    kind: Literal["number", "choice", "switch", "text"]
    default: Any
    choices: list[str]  # all there are; empty: any value of its kind
    least: float | None  # of a number
    most: float | None


def page_options(question: type = Question) -> list[ControlOut]:
    """Return the options of a question that have a label, with what is said of them."""
    return [
        ControlOut(
            name=name,
            label=label,
            help=key.help,
            kind=_control_for(key.kind),
            default=key.default,
            choices=list(key.kind.known),
            least=key.kind.range and key.kind.range.least,
            most=key.kind.range and key.kind.range.most,
        )
        for name, (key, label) in question_options(question).items()
        if label
    ]


def _control_for(kind: Kind) -> Literal["number", "choice", "switch", "text"]:
    if kind.known:
        return "choice"
    if kind.type is bool:
        return "switch"
    return "number" if kind.type in (int, float) else "text"


class InfoOut(Outgoing):
    model: str  # the usual one; `context`, `dial` and `strategies` are its
    context: int | None  # tokens of prompt and answer together; null: not known
    version: str
    keys: bool  # API keys are set: /v1 needs one
    kb_root: bool  # uploads can make knowledge bases
    kept_answers: int  # of each tenant; 0: no details can be asked for
    conversations: bool  # are kept on the server
    tenant: str  # whose key it is; "": of none
    dial: list[DialOut]
    strategies: list[WayOut]  # what can be compared
    models: list[ServedModelOut]  # all that are served, the usual one first
    engine: bool  # is in this process, and can be looked at; false: this is a gateway
    k: int  # chunks in front of a question, where none is said
    options: list[ControlOut]  # of a question, which the web page has controls for
    formats: list[str]  # endings of files that uploads take


class DemoOut(Outgoing):
    name: str  # of its knowledge base
    documents: int  # that it has
    questions: list[str]
    loaded: bool


class DemoLoaded(Outgoing):
    """The outcome of POST /v1/demo."""

    name: str  # of its knowledge base
    questions: list[str]
    report: IngestOut


LONGEST_TITLE = 300
MOST_MESSAGES = 2000


class SavedMessage(Incoming):
    """What was said; the page's own notes on it go with it."""

    role: Literal["system", "user", "assistant"]
    content: Text
    meta: dict[str, Any] | None = None  # the page's own: id, times, sources


class ConversationIn(Incoming):
    """The body of PUT /v1/conversations/{id}."""

    title: Annotated[Text, Field(max_length=LONGEST_TITLE)] = ""
    messages: Annotated[list[SavedMessage], Field(max_length=MOST_MESSAGES)]
    updated: Annotated[float, Field(ge=0, allow_inf_nan=False)]  # seconds since 1970
    meta: dict[str, Any] | None = None  # the page's own: knowledge base, dial


class ConversationOut(Outgoing):
    id: str
    title: str
    messages: list[dict[str, Any]]
    updated: float
    meta: dict[str, Any] | None = None


class ConversationLineOut(Outgoing):
    id: str
    title: str
    updated: float
    messages: Annotated[int, attribute("num_messages")]


class ConversationList(Outgoing):
    object: Literal["list"] = "list"
    data: list[ConversationLineOut]  # newest first


class ConversationRemoved(Outgoing):
    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: Literal[True] = True
