"""Tools in chats: what a request offers, what messages bring back, what a reply calls."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from kvweave.app.answer.question import MOST_TOOLS, TOOL_CHOICES
from kvweave.app.weave import ToolCall
from kvweave.serve.wire.base import Incoming, Outgoing, Text, at_most

MOST_CALLS = 128  # of one message


class FunctionIn(Incoming):
    """A function that the model may call."""

    name: Text
    description: Text | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema; left out: any object
    strict: bool | None = None  # calls that must come are always held to it


class ToolIn(Incoming):
    type: Literal["function"]
    function: FunctionIn


Tools = Annotated[list[ToolIn], BeforeValidator(at_most(MOST_TOOLS, "tools"))]


class FunctionNameIn(Incoming):
    name: Text


class NamedToolIn(Incoming):
    """The one function that must be called."""

    type: Literal["function"]
    function: FunctionNameIn


def _choice(value: Any) -> Any:
    """Not a union type: those report each fault once per member."""
    if isinstance(value, dict):
        return NamedToolIn.model_validate(value).model_dump()
    if value in TOOL_CHOICES:
        return value
    known = ", ".join(TOOL_CHOICES)
    raise PydanticCustomError("tool_choice", f"must be {known} or one function by its name")


ToolChoice = Annotated[
    Any,
    BeforeValidator(
        _choice, json_schema_input_type=Literal["none", "auto", "required"] | NamedToolIn
    ),
]


class CalledFunctionIn(Incoming):
    name: Text
    arguments: Text = "{}"  # a JSON object


class ToolCallIn(Incoming):
    """A call of an earlier answer, as the reply had it."""

    id: Text
    type: Literal["function"] = "function"
    function: CalledFunctionIn
    index: int | None = None  # what streams number them by: some clients leave it in


ToolCalls = Annotated[list[ToolCallIn], BeforeValidator(at_most(MOST_CALLS, "tool calls"))]


class CalledFunctionOut(Outgoing):
    name: str
    arguments: str  # a JSON object


class ToolCallOut(Outgoing):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunctionOut


def call_out(call: ToolCall) -> ToolCallOut:
    function = CalledFunctionOut(name=call.name, arguments=call.arguments)
    return ToolCallOut(id=call.id, function=function)
